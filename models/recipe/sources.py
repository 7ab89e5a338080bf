"""Where the training text comes from: packages named with their licences, nothing else.

Python packages are pinned to a version. Debian packages follow the stable release, so `prepare` writes the exact
versions and hashes it read into `manifest.json`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """One package that text is read from.

    name: the package's name in its registry.
    licence: what its own metadata or copyright file says.
    version: pinned version of a Python package; empty for a Debian package.
    include: path fragments of which a file must contain one (empty: every file).
    exclude: path fragments of which a file must contain none.
    permissive: whether excerpts may be shipped as held-out text beside this repository's own files.
    """

    name: str
    licence: str
    version: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    permissive: bool = True


CONVERSATION: tuple[Source, ...] = (Source("chitchat-dataset", "MIT", "0.9.0"),)

CODE: tuple[Source, ...] = (
    Source("aiohttp", "Apache-2.0", "3.14.5"),
    Source("aiosmtpd", "Apache-2.0", "1.4.6"),
    Source("apache-airflow-core", "Apache-2.0", "3.3.2"),
    Source("astropy", "BSD-3-Clause", "8.0.2"),
    Source("attrs", "MIT", "26.1.0"),
    Source("black", "MIT", "26.10.1"),
    Source("bokeh", "BSD-3-Clause", "3.9.2"),
    Source("celery", "BSD-3-Clause", "5.7.0"),
    Source("cinder", "Apache-2.0", "29.0.0"),
    Source("click", "BSD-3-Clause", "8.5.1"),
    Source("dask", "BSD-3-Clause", "2026.8.0"),
    Source("distributed", "BSD-3-Clause", "2026.8.0"),
    Source("django", "BSD-3-Clause", "5.2.19"),
    Source("docutils", "public domain, BSD-2-Clause", "0.23"),
    Source("fastapi", "MIT", "0.165.0"),
    Source("flask", "BSD-3-Clause", "3.1.3"),
    Source("flax", "Apache-2.0", "0.12.8"),
    Source("homeassistant", "Apache-2.0", "2024.3.3"),
    Source("httpx", "BSD-3-Clause", "0.28.1"),
    Source("ipython", "BSD-3-Clause", "9.18.1"),
    Source("jax", "Apache-2.0", "0.10.2"),
    Source("jinja2", "BSD-3-Clause", "3.1.6"),
    Source("keras", "Apache-2.0", "3.15.1"),
    Source("keystone", "Apache-2.0", "30.0.0"),
    Source("matplotlib", "Matplotlib licence (PSF-like)", "3.11.2"),
    Source("mlflow", "Apache-2.0", "3.18.0"),
    Source("networkx", "BSD-3-Clause", "3.6.1"),
    Source("neutron", "Apache-2.0", "29.0.0"),
    Source("nltk", "Apache-2.0", "3.10.4"),
    Source("nova", "Apache-2.0", "34.0.0"),
    Source("numpy", "BSD-3-Clause", "2.4.6"),
    Source("pandas", "BSD-3-Clause", "3.1.1"),
    Source("pydantic", "MIT", "2.14.4"),
    Source("pygments", "BSD-2-Clause", "2.21.0", exclude=("/_",)),
    Source("pytest", "MIT", "9.2.0"),
    Source("requests", "Apache-2.0", "2.34.2"),
    Source("rich", "MIT", "15.0.0"),
    Source("scikit-image", "BSD-3-Clause", "0.26.0"),
    Source("scikit-learn", "BSD-3-Clause", "1.9.1"),
    Source("scipy", "BSD-3-Clause", "1.17.1"),
    Source("scrapy", "BSD-3-Clause", "2.19.0"),
    Source("sphinx", "BSD-2-Clause", "9.0.4"),
    Source("sqlalchemy", "MIT", "2.1.9"),
    Source("starlette", "BSD-3-Clause", "1.10.0"),
    Source("statsmodels", "BSD-3-Clause", "0.15.0"),
    Source("sympy", "BSD-3-Clause", "1.14.0"),
    Source("textual", "MIT", "8.2.8"),
    Source("tornado", "Apache-2.0", "6.6.1"),
    Source("transformers", "Apache-2.0", "5.24.0"),
    Source("twisted", "MIT", "26.10.0"),
    Source("wagtail", "BSD-3-Clause", "8.0.1"),
    Source("werkzeug", "BSD-3-Clause", "3.1.9"),
    Source("xarray", "Apache-2.0", "2026.9.0"),
)

PROSE: tuple[Source, ...] = (
    Source("apache2-doc", "Apache-2.0", include=("/manual/en/",)),
    Source("bind9-doc", "MPL-2.0", include=("/arm/",), permissive=False),
    Source("borgbackup-doc", "BSD-3-Clause"),
    Source("clang-14-doc", "Apache-2.0 with LLVM exception"),
    Source("cmake-doc", "BSD-3-Clause"),
    Source("debian-faq", "GPL-2+", permissive=False),
    Source("debian-handbook", "CC-BY-SA-3.0 or GPL-2+", include=("/html/en-US/",), permissive=False),
    Source("debian-policy", "GPL-2+", permissive=False),
    Source("debian-reference-en", "GPL-2+", permissive=False),
    Source("debmake-doc", "MIT"),
    Source("developers-reference", "GPL-2+", permissive=False),
    Source("erlang-doc", "Apache-2.0"),
    Source("exim4-doc-html", "GPL-2+", permissive=False),
    Source("flex-doc", "BSD"),
    Source("ghc-doc", "BSD-3-Clause", include=("/users_guide/", "/haddock/")),
    Source("git-doc", "GPL-2", exclude=("/RelNotes",), permissive=False),
    Source("gnuplot-doc", "gnuplot licence", permissive=False),
    Source("harden-doc", "GPL-2", include=("/html/en-US/",), permissive=False),
    Source("installation-guide-amd64", "GPL-2+", include=("/en/",), permissive=False),
    Source("kicad-doc-en", "GPL-3+ or CC-BY-3.0+", permissive=False),
    Source("libboost1.81-doc", "BSL-1.0", exclude=("/boost_asio/reference", "/header/")),
    Source("libglib2.0-doc", "LGPL-2.1+", permissive=False),
    Source("libgtk-3-doc", "LGPL-2+", permissive=False),
    Source("libreoffice-help-en-us", "MPL-2.0", permissive=False),
    Source("libvirt-doc", "LGPL-2.1+", permissive=False),
    Source("linux-doc-6.1", "GPL-2", exclude=("/translations/", "/_sources/"), permissive=False),
    Source("llvm-14-doc", "Apache-2.0 with LLVM exception", exclude=("/AMDGPU/",)),
    Source("maint-guide", "GPL-2+", permissive=False),
    Source("nodejs-doc", "MIT", exclude=("/api/all.html",)),
    Source("octave-doc", "GPL-3+", permissive=False),
    Source("perl-doc", "Artistic or GPL-1+", permissive=False),
    Source("postfix-doc", "IPL-1.0 or EPL-2.0", permissive=False),
    Source("postgis-doc", "CC-BY-SA-3.0", permissive=False),
    Source("postgresql-doc-15", "PostgreSQL licence"),
    Source("python-django-doc", "BSD-3-Clause", exclude=("/_modules/",)),
    Source("python-scipy-doc", "BSD-3-Clause"),
    Source("python-sqlalchemy-doc", "MIT", exclude=("/_modules/", "/rst/")),
    Source("python3.11-doc", "PSF-2.0", exclude=("/_sources/",)),
    Source("qtbase5-doc-html", "GFDL-1.3", permissive=False),
    Source("rust-doc", "MIT or Apache-2.0", exclude=("/html/src/", "/html/core/", "/unstable-book/", "/print.html")),
    Source("sqlite3-doc", "public domain"),
    Source("swi-prolog-doc", "BSD-2-Clause"),
    Source("twisted-doc", "MIT", exclude=("/html/api/",)),
    Source("zsh-doc", "MIT-like (Zsh licence)"),
)
