"""What is done element by element: exp, SiLU, softmax, RMSNorm. Plain loops, which LLVM vectorises."""

from __future__ import annotations

import numpy as np

from forefetch.kernels.compiled.simd import power_of_two
from forefetch.kernels.compiled.toolchain import compiled

_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_LEAST, _MOST = np.float32(-60.0), np.float32(88.0)
_A, _B, _C = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_D, _E, _F = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_HALF, _ONE, _ZERO = np.float32(0.5), np.float32(1.0), np.float32(0.0)


@compiled()
def assign(to, source):
    """to[i] = source[i], both [N]. One slice assigned to another brings the text of its error with it: 3 s more to compile."""
    for i in range(len(to)):
        to[i] = source[i]


@compiled()
def exp(x):
    """e ** x in float32, to 2 units in the last place (Cephes' expf); NaN stays NaN, what would overflow ends at e ** 88.

    Below -60 it is 0: beside the 1 that it is added to or compared with everywhere here, that is nothing, and smaller numbers
    would leave subnormal ones behind, which a CPU multiplies a hundred times as slowly.
    """
    vanishes = x < _LEAST
    x = _LEAST if vanishes else x
    x = _MOST if x > _MOST else x
    n = np.floor(x * _LOG2E + _HALF)
    x = x - n * _LN2_HIGH - n * _LN2_LOW
    y = ((((_A * x + _B) * x + _C) * x + _D) * x + _E) * x + _F
    power = (y * x * x + x + _ONE) * power_of_two(np.int32(n))
    return _ZERO if vanishes else power


@compiled()
def silu_times(hidden, active):
    """active [I] = silu(gate) * up of hidden [2I] = gate, up."""
    width = len(active)
    for i in range(width):
        active[i] = hidden[i] / (_ONE + exp(-hidden[i])) * hidden[width + i]


@compiled(reassociate=True)
def largest(x):
    """The maximum; any NaN makes it NaN or leaves it out."""
    best = x[0]
    for i in range(1, len(x)):
        best = x[i] if x[i] > best else best
    return best


@compiled(reassociate=True)
def softmax(x):
    """In place; what is divided by comes back as a factor, so that who uses it may do that later: x = e ** (x - max)."""
    best, total = largest(x), np.float32(0)
    for i in range(len(x)):
        x[i] = exp(x[i] - best)
    for i in range(len(x)):
        total += x[i]
    return _ONE / total


@compiled(reassociate=True)
def rms_norm(x, weight, eps, out):
    """out [n] = x / rms(x) * weight."""
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    scale = _ONE / np.sqrt(total / np.float32(len(x)) + eps)
    for i in range(len(x)):
        out[i] = x[i] * scale * weight[i]
