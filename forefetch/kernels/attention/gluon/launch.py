"""Programmatic dependent launch in Gluon: `kernels/pdl.py` says what it is."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def await_others():
    """What the kernel before wrote is there when this returns."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_others_start():
    """Once all programs have come here or ended, the next kernel may be brought to the processors, where it waits."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
