"""The import law of ARCHITECTURE.md as a function of the source, read with `ast`; a violation names file and line."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ("router_service", "expert_worker", "kv_service")
PACKAGES = ("forefetch", *SERVICES)
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 100  # of a device kernel: what is split off one loses the registers that it shares

# Modules (with everything below them) that must never load a library, not even through another module of ours.
TORCHLESS = (
    "errors",
    "hints",
    "plan",
    "plan_chart",
    "shapes",
    "settings",
    "rpc",
    "telemetry",
    "client",
    "sharing",
    "sharer",
    "cli",
    "cluster",
    "cluster_config",
    "process",
    "child",
)
GRPCLESS = ("errors", "hints", "plan", "plan_chart", "shapes", "spec", "families", "placement", "rounding", "wire", "kernels")
KERNELS_MAY = ("torch", "triton", "forefetch.kernels")
COMPILED = ("forefetch.kernels.compiled", "forefetch.kernels.grouped_mlp.cpu")
COMPILED_MAY = ("numba", "llvmlite", "numpy")

# Rooms of a service, highest first: a module imports its own room and those below.
ROOMS: dict[str, tuple[str, ...]] = {
    "edge": (
        "__main__",
        "server",
        "wiring",
        "client",
        "sharing",
        "sharer",
        "links",
        "wired",
        "p2p_link",
        "p2p_beside",
        "twin",
        "hinting",
        "control",
        "build",
        "models",
        "status",
        "asking",
        "callers",
        "conversations",
        "told",
    ),
    "device": (
        *(
            "engine",
            "streams",
            "finite",
            "outgoing",
            "flight",
            "trunk",
            "decoder",
            "captured",
            "layouts",
            "layers",
            "batch",
            "cache",
            "rope",
            "dispatch",
            "turns",
            "workers",
            "sampling",
        ),
        *(
            "text",
            "detokenise",
            "answer",
            "recorder",
            "core",
            "experts",
            "packed",
            "packed_slots",
            "packed_placed",
            "compiled",
            "compiled_sizes",
            "whole",
            "ahead",
            "between",
            "in_place",
            "moving",
            "shadowed",
            "shadowed_in_place",
            "beside",
            "lookahead",
            "hints",
            "hinted",
            "sealed",
            "sealed_step",
            "sizing",
            "quality",
        ),
        *("disk", "walk", "crashes", "vault", "session_log", "session_rows", "operators"),
        *("kv", "handover", "lane", "replicas", "prefix", "naming", "sessions", "live", "rows"),
        *("host", "pool", "convert", "residency", "visit", "copying"),
        *("evaluator", "p2p", "p2p_following", "p2p_device", "p2p_decoder", "p2p_hints", "loading", "placer", "discovery"),
        *("kubernetes_api", "reconciler", "placing"),
    ),
    "config": ("config", "discovery_config", "cache_config"),
    "pure": (
        *("__init__", "scheduler", "pages", "admission", "slots", "store", "store_sessions", "keys", "outbox", "intake"),
        *("store_order", "store_room", "parts", "block_messages", "shared_frames", "answers", "labels"),
        *("segments", "cost", "journal", "prefetch", "misses", "forecast", "shelf", "retiring"),
        *("endpoints", "election", "planner"),
    ),
}
PURE_MAY_NOT = (
    "grpc",
    "asyncio",
    "threading",
    "multiprocessing",
    "time",
    "datetime",
    "os",
    "random",
    "torch",
    "forefetch.settings",
)


@dataclass(frozen=True)
class Import:
    """One import statement's target. `lazy` when it runs inside a function and not when the module is loaded."""

    target: str
    line: int
    lazy: bool


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    tree: ast.Module
    lines: int
    imports: tuple[Import, ...]


def violations(root: Path) -> list[str]:
    """Every breach under `root`, as "file:line: what"."""
    modules = load(root)
    found: list[str] = []
    for module in modules.values():
        for line, text in [*_sizes(module), *_environment(module), *_own_imports(module), *_reaches(module, modules)]:
            found.append(f"{module.path.relative_to(root)}:{line}: {text}")
    return found


def load(root: Path) -> dict[str, Module]:
    """All modules of the packages but the generated stubs, by dotted name."""
    paths = {}
    for path in sorted(p for package in PACKAGES for p in (root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[:2] != ("forefetch", "v1"):
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    modules = {}
    for name, path in paths.items():
        text = path.read_text()
        tree = ast.parse(text)
        imports = tuple(_imports(tree, paths))
        modules[name] = Module(name, path, tree, len(text.splitlines()), imports)
    return modules


def _imports(node: ast.AST, ours: dict[str, Path], lazy: bool = False) -> Iterator[Import]:
    """Import targets below `node`; `from a import b` means a.b when that is a module of ours, else a."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            if child.level:
                yield Import("<relative>", child.lineno, lazy)
            for target in {_resolve(child.module or "", alias.name, ours) for alias in child.names}:
                yield Import(target, child.lineno, lazy)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from (found for part in child.orelse for found in _imports(part, ours, lazy))
        else:
            inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, ours, inside)


def _resolve(module: str, name: str, ours: dict[str, Path]) -> str:
    return f"{module}.{name}" if f"{module}.{name}" in ours else module


def _under(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def _sizes(module: Module) -> Iterator[tuple[int, str]]:
    if module.lines > MAX_FILE_LINES:
        yield 1, f"{module.lines} lines, more than {MAX_FILE_LINES}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            limit = MAX_KERNEL_LINES if kernel else MAX_FUNCTION_LINES
            if lines > limit:
                yield node.lineno, f"{node.name} has {lines} lines, more than {limit}"


def _environment(module: Module) -> Iterator[tuple[int, str]]:
    """`os.environ` is read in settings.py and nowhere else."""
    if module.name == "forefetch.settings":
        return
    names = ("environ", "environb", "getenv", "putenv")
    for node in ast.walk(module.tree):
        attribute = isinstance(node, ast.Attribute) and node.attr in names and isinstance(node.value, ast.Name)
        if attribute and node.value.id == "os":  # type: ignore[attr-defined]
            yield node.lineno, "touches os.environ; only forefetch/settings.py does"  # type: ignore[attr-defined]
        if isinstance(node, ast.ImportFrom) and node.module == "os" and {a.name for a in node.names} & set(names):
            yield node.lineno, "touches os.environ; only forefetch/settings.py does"


def _own_imports(module: Module) -> Iterator[tuple[int, str]]:
    """The law for single import statements: packages, services, rooms, kernels."""
    package = module.name.split(".")[0]
    if package in SERVICES and _room_of(module.name) is None:
        yield 1, f"{module.name} is in no room; add it to ROOMS and to ARCHITECTURE.md"
    for found in module.imports:
        if found.target == "<relative>":
            yield found.line, "relative import; name the package"
        other = found.target.split(".")[0]
        if package == "forefetch" and other in SERVICES:
            yield found.line, f"forefetch imports the service module {found.target}"
        elif other in SERVICES and other != package and found.target != f"{other}.client":
            yield found.line, f"{package} imports {found.target}; another service is reached through its client.py only"
        elif other == package and package in SERVICES:
            yield from _room(module, found)
        if _under(module.name, ("forefetch.kernels",)) and not _kernel_may(module.name, found.target):
            yield found.line, f"a kernel imports {found.target}; torch and triton are all it may"


def _kernel_may(module: str, target: str) -> bool:
    if _under(module, COMPILED) and _under(target, COMPILED_MAY):
        return True
    return _under(target, KERNELS_MAY) or target.partition(".")[0] in sys.stdlib_module_names


def _room_of(name: str) -> int | None:
    leaf = name.split(".")[1] if "." in name else "__init__"
    return next((rank for rank, names in enumerate(ROOMS.values()) if leaf in names), None)


def _room(module: Module, found: Import) -> Iterator[tuple[int, str]]:
    mine, other = _room_of(module.name), _room_of(found.target)
    if mine is not None and other is not None and other < mine:
        names = list(ROOMS)
        yield found.line, f"a {names[mine]} module imports the {names[other]} module {found.target}"


def _reaches(module: Module, modules: dict[str, Module]) -> Iterator[tuple[int, str]]:
    """Libraries that a module must not load, also through other modules of ours."""
    forbidden: tuple[str, ...] = ()
    if _under(module.name, tuple(f"forefetch.{name}" for name in TORCHLESS)):
        forbidden += ("torch", "triton", "transformers")
    if _under(module.name, tuple(f"forefetch.{name}" for name in GRPCLESS)):
        forbidden += ("grpc",)
    if module.name.split(".")[0] in SERVICES and _room_of(module.name) == list(ROOMS).index("pure"):
        forbidden += PURE_MAY_NOT
    for found in module.imports if forbidden else ():
        chain = _path_to(found.target, forbidden, modules, {module.name})
        if chain:
            yield found.line, f"{module.name} must not load {chain[-1]}, but does: {' -> '.join(chain)}"


def _path_to(target: str, forbidden: tuple[str, ...], modules: dict[str, Module], seen: set[str]) -> list[str] | None:
    """Shortest-first chain of imports from `target` to something forbidden."""
    if _under(target, forbidden):
        return [target]
    if target.endswith("_pb2_grpc") and "grpc" in forbidden:
        return [target, "grpc"]
    if target in seen or target not in modules:
        return None
    seen.add(target)
    imports = list(modules[target].imports)
    if modules[target].path.name == "__init__.py":
        imports = [found for found in imports if not found.lazy]  # loading a package runs no function of it
    if "." in target:
        imports.append(Import(target.rsplit(".", 1)[0], 0, False))
    for found in imports:
        chain = _path_to(found.target, forbidden, modules, seen)
        if chain:
            return [target, *chain]
    return None
