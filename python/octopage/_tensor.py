"""Tensors of the frameworks as octopage sees them: an address, a type, a shape, strides, a device.

torch, numpy and cupy are read through their own attributes, which costs no synchronisation and knows
all dtypes; anything else comes through DLPack.
"""

import operator
import sys

import numpy

from . import _core
from ._errors import InvalidArgument

_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float8_e4m3fn": "f8_e4m3fn",
          "uint8": "u8", "int32": "i32", "int64": "i64"}


class ArgumentTypeError(InvalidArgument, TypeError):
    """A value of the wrong kind."""


def dtype_name(argument, dtype):
    if isinstance(dtype, type):  # numpy.float16, ml_dtypes.bfloat16, ...
        dtype = numpy.dtype(dtype)
    name = getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")
    if name in _NAMES.values():
        return name
    try:
        return _NAMES[name]
    except KeyError:
        raise ArgumentTypeError(f"{argument}: dtype must be one of {', '.join(_NAMES)}, is {name}") from None


def framework(tensor):
    """'torch', 'cupy', 'jax', 'numpy', 'dlpack', or None for what is no tensor."""
    kind = type(tensor)
    root = (kind.__module__ or "").partition(".")[0]
    if root == "torch" or (root != "numpy" and "torch" in sys.modules
                           and isinstance(tensor, sys.modules["torch"].Tensor)):
        return "torch"
    if isinstance(tensor, numpy.ndarray):
        return "numpy"
    if root == "cupy":
        return "cupy"
    if root in ("jax", "jaxlib"):
        return "jax"
    return "dlpack" if hasattr(tensor, "__dlpack__") else None


def view(argument, tensor, *, write=False):
    """A `_core.Tensor`; the caller keeps `tensor` alive. DLPack imports are kept by the view's owner,
    the second value."""
    kind = framework(tensor)
    if kind in ("torch", "numpy", "cupy") and not 1 <= tensor.ndim <= 4:
        raise InvalidArgument(f"{argument}: must have 1 to 4 dimensions, has {tensor.ndim}")
    if kind == "torch":
        device = tensor.device
        if device.type not in ("cpu", "cuda"):
            raise ArgumentTypeError(f"{argument}: must lie on the CPU or a CUDA device, lies on {device}")
        return _core.tensor(tensor.data_ptr(), dtype_name(argument, tensor.dtype), list(tensor.shape),
                            list(tensor.stride()), device.type == "cuda", device.index or 0), tensor
    if kind in ("numpy", "cupy"):
        strides = []
        for stride in tensor.strides:
            if stride % tensor.itemsize != 0:
                raise InvalidArgument(f"{argument}: strides must be whole elements of {tensor.itemsize} bytes, "
                                      f"one is {stride} bytes")
            strides.append(stride // tensor.itemsize)
        if kind == "numpy" and write and not tensor.flags.writeable:
            raise InvalidArgument(f"{argument}: must be writable, the array is read-only")
        pointer = tensor.ctypes.data if kind == "numpy" else tensor.data.ptr
        return _core.tensor(pointer, dtype_name(argument, tensor.dtype), list(tensor.shape), strides,
                            kind == "cupy", 0 if kind == "numpy" else tensor.device.id), tensor
    if kind is None:
        raise ArgumentTypeError(f"{argument}: must be a tensor (torch, numpy, cupy, jax, or anything with "
                                f"__dlpack__), is {type(tensor).__name__}")
    if kind == "jax" and write:
        raise ArgumentTypeError(f"{argument}: arrays of jax cannot be written to")
    try:
        imported = _core.import_dlpack(tensor)
    except TypeError as error:
        raise ArgumentTypeError(f"{argument}: {type(tensor).__name__}.__dlpack__ gives no tensor that octopage can "
                                f"read (1 to 4 dimensions on the CPU or a CUDA device, of {', '.join(_NAMES)})") from error
    return imported.view, imported


def stream_of(tensor):
    """The framework's current stream for the tensor's device, as an integer; 0 on the CPU."""
    kind = framework(tensor)
    if kind == "torch" and tensor.is_cuda:
        return sys.modules["torch"].cuda.current_stream(tensor.device).cuda_stream
    if kind == "cupy":
        return sys.modules["cupy"].cuda.get_current_stream().ptr
    return 0


def empty_like(tensor, shape, dtype):
    """A new tensor of the same framework and device. `dtype` is a name such as 'bf16'."""
    kind = framework(tensor)
    long_name = next(long for long, short in _NAMES.items() if short == dtype)
    if kind == "torch":
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, long_name), device=tensor.device)
    if kind == "cupy":
        return sys.modules["cupy"].empty(shape, dtype=_numpy_dtype(long_name))
    if kind == "numpy":
        return numpy.empty(shape, dtype=_numpy_dtype(long_name))
    raise ArgumentTypeError(f"tensors of {type(tensor).__name__} cannot be allocated here: give the outputs")


def _numpy_dtype(long_name):
    if long_name in ("bfloat16", "float8_e4m3fn"):
        import ml_dtypes

        return numpy.dtype(getattr(ml_dtypes, long_name))
    return numpy.dtype(long_name)


class _Exported:
    """Memory of the library for other frameworks."""

    def __init__(self, core_tensor, owner):
        self._tensor, self._owner = core_tensor, owner

    def __dlpack__(self, **_):
        return _core.export_dlpack(self._tensor, self._owner)

    def __dlpack_device__(self):
        return (2, self._tensor.device_index) if self._tensor.on_cuda else (1, 0)


def exported(core_tensor, owner, kind):
    """Memory of the library as a tensor of the framework `kind`; it keeps `owner` alive."""
    if kind in ("torch", "cupy"):
        return sys.modules[kind].from_dlpack(_Exported(core_tensor, owner))
    array = _core.export_numpy(core_tensor, owner)
    return array.view(_numpy_dtype("bfloat16")) if core_tensor.dtype == "bf16" else array


def integer(argument, value):
    """A Python integer that fits 64 bits."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentTypeError(f"{argument}: must be an integer, is {type(value).__name__}") from None
    if not -2**63 <= number < 2**63:
        raise InvalidArgument(f"{argument}: {number} does not fit 64 bits")
    return number


def host_integers(argument, values):
    """[n] i64 of numpy from a sequence, array or tensor of any integer type."""
    if framework(values) == "torch":
        values = values.detach().cpu().numpy()
    array = numpy.asarray(values)
    if array.ndim != 1:
        raise InvalidArgument(f"{argument}: must have one dimension, has {array.ndim}")
    if array.size == 0:
        return numpy.zeros(0, numpy.int64)
    if array.dtype.kind not in "iu":
        raise ArgumentTypeError(f"{argument}: must be integers, are {array.dtype}")
    if array.dtype == numpy.uint64 and int(array.max()) > 2**63 - 1:
        raise InvalidArgument(f"{argument}: {int(array.max())} is larger than 2^63 - 1")
    return numpy.ascontiguousarray(array, dtype=numpy.int64)


class Call:
    """Arguments of one call: views, the tensors that they belong to, and options."""

    def __init__(self, first, *, backend=None, strict=False, status=None, batch_invariant=False,
                 workspace=None, threads=0):
        self.keep = []
        options = _core.Options()
        if backend is not None and not isinstance(backend, str):
            raise ArgumentTypeError(f"backend: must be a name, is {type(backend).__name__}")
        options.backend = backend or ""
        options.strict = bool(strict)
        options.batch_invariant = bool(batch_invariant)
        options.threads = threads
        options.stream = stream_of(first)
        self.options = options
        if status is not None:
            word = self.view("status", status, write=True)
            if word.dtype != "i32" or word.shape != [1]:
                raise InvalidArgument(f"status: must be i32 [1], is {word.dtype} {word.shape}")
            options.status = word.pointer
        if workspace is not None:
            self.set_workspace(workspace)

    def view(self, argument, tensor, *, write=False):
        described, owner = view(argument, tensor, write=write)
        self.keep.append(owner)
        return described

    def maybe(self, argument, tensor, *, write=False):
        return None if tensor is None else self.view(argument, tensor, write=write)

    def scale(self, argument, scale):
        """None, a number, or a tensor of one f32 on the cache's device."""
        if scale is None or isinstance(scale, (int, float)):
            return scale
        return self.view(argument, scale)

    def set_workspace(self, workspace):
        described = self.view("workspace", workspace, write=True)
        size = numpy.dtype({"bf16": "u2", "f16": "u2", "f32": "u4", "f8_e4m3fn": "u1", "u8": "u1",
                            "i32": "u4", "i64": "u8"}[described.dtype]).itemsize
        for extent in described.shape:
            size *= extent
        self.options.workspace = described.pointer
        self.options.workspace_bytes = size
