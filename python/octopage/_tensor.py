"""Tensors of the frameworks as octopage sees them: an address, a type, a shape, strides, a device.

torch, numpy and cupy are read through their own attributes, which costs no synchronisation and knows
all dtypes; anything else comes through DLPack. A call looks at each of its arguments once.
"""

import math
import numbers
import operator
import re
import sys

import numpy

from . import _core
from ._errors import InvalidArgument, OutOfMemory, WrongState

_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float8_e4m3fn": "f8_e4m3fn",
          "uint8": "u8", "int32": "i32", "int64": "i64"}
_LONG_NAMES = {short: long for long, short in _NAMES.items()}
_LARGEST_F32 = 3.4028235677973366e38  # from here on f32 rounds to infinity


class ArgumentTypeError(InvalidArgument, TypeError):
    """A value of the wrong kind."""


class NotPlanned(WrongState, AttributeError):
    """An attribute of a plan that has not been made: `hasattr` says no."""


def tracing():
    """Whether torch reads this call instead of running it: torch.compile, fake tensors, make_fx, any dispatch mode."""
    torch = sys.modules.get("torch")
    return torch is not None and (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0)


def shown(value):
    """A value as a message shows it: short, and printable whatever it is."""
    try:
        text = ascii(value)
    except Exception:  # integers of thousands of digits have no text; a caller's repr may fail
        text = f"a value of {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def dtype_name(argument, dtype):
    if isinstance(dtype, type):  # numpy.float16, ml_dtypes.bfloat16, ...
        try:
            dtype = numpy.dtype(dtype)
        except TypeError:
            raise ArgumentTypeError(
                f"{argument}: dtype must be one of {', '.join(_NAMES)}, is {shown(dtype)}") from None
    if isinstance(dtype, numpy.dtype) and not dtype.isnative:
        raise ArgumentTypeError(f"{argument}: must have this machine's byte order, is {dtype!r}")
    name = getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")
    if name in _LONG_NAMES:
        return name
    found = _NAMES.get(name) if isinstance(name, str) else None
    if found is None:
        raise ArgumentTypeError(f"{argument}: dtype must be one of {', '.join(_NAMES)}, is {shown(name)}")
    return found


def check_out_dtype(dtype, of_query, f32):
    """Of an output that is allocated here: the library would call it `out`. Names, or dtypes of torch."""
    if dtype not in (of_query, f32):
        raise InvalidArgument(f"out_dtype: must be the query's, {of_query}, or {f32}, is {dtype}")


def framework(tensor):
    """'torch', 'cupy', 'jax', 'numpy', 'dlpack', or None for what is no tensor."""
    kind = type(tensor)
    root = (kind.__module__ or "").partition(".")[0]
    if root != "numpy" and "torch" in sys.modules and isinstance(tensor, sys.modules["torch"].Tensor):
        return "torch"
    if isinstance(tensor, numpy.ndarray):
        return "numpy"
    if root == "cupy" and hasattr(tensor, "__cuda_array_interface__"):
        return "cupy"
    if root in ("jax", "jaxlib") and hasattr(tensor, "__dlpack__"):
        return "jax"
    return "dlpack" if hasattr(tensor, "__dlpack__") and not isinstance(tensor, type) else None


def _check_rank(argument, rank, scalar):
    if not (0 if scalar else 1) <= rank <= 4:
        raise InvalidArgument(f"{argument}: must have {0 if scalar else 1} to 4 dimensions, has {rank}")


def refuse_derivatives(argument, tensor):
    """Where torch records gradients, or carries tangents forward, a result without them would pass for a constant."""
    torch = sys.modules["torch"]
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentTypeError(f"{argument}: requires grad, and octopage has no backward pass: call under torch.no_grad(), or "
                                f"give {argument}.detach()")
    forward = torch.autograd.forward_ad  # of most calls no level is open; no_grad() does not close one
    if forward._current_level >= 0 and tensor.is_floating_point() and forward.unpack_dual(tensor).tangent is not None:
        raise ArgumentTypeError(f"{argument}: is a dual tensor of forward-mode differentiation, which octopage has none of: "
                                f"give torch.autograd.forward_ad.unpack_dual({argument}).primal")


def _torch_view(argument, tensor):
    device = tensor.device
    if device.type not in ("cpu", "cuda"):
        raise ArgumentTypeError(f"{argument}: must lie on the CPU or a CUDA device, lies on {device}")
    if tensor.layout is not sys.modules["torch"].strided:
        raise ArgumentTypeError(f"{argument}: must be a dense tensor, is {tensor.layout}")
    if tensor.is_neg():  # its memory holds other values than it shows; lazy conjugates are complex, which no dtype is
        raise ArgumentTypeError(f"{argument}: must hold its values as they are, is a lazy negation: give "
                                f"{argument}.resolve_neg()")
    refuse_derivatives(argument, tensor)
    try:
        pointer = tensor.data_ptr()
    except RuntimeError as error:
        raise ArgumentTypeError(f"{argument}: must have memory of its own, which tensors inside of torch.vmap and "
                                f"torch.func's transforms lack: {shown(str(error))}") from error
    if pointer == 0 and tensor.numel() > 0:
        raise ArgumentTypeError(f"{argument}: must have memory, this {type(tensor).__name__} of shape "
                                f"{list(tensor.shape)} has none: it is fake, a wrapper, or its storage was freed")
    return _core.tensor(pointer, dtype_name(argument, tensor.dtype), list(tensor.shape) or [1],
                        list(tensor.stride()) or [1], device.type == "cuda", device.index or 0)


def _refuse_masked(argument, array):
    """An array of numpy.ma shows other values than its memory holds."""
    if isinstance(array, numpy.ma.MaskedArray):
        raise ArgumentTypeError(f"{argument}: must be an array without a mask, is a {type(array).__name__}: give "
                                f"{argument}.filled(...) or {argument}.data")


def _array_view(argument, tensor, kind, write):
    _refuse_masked(argument, tensor)
    strides = []
    for extent, stride in zip(tensor.shape, tensor.strides):
        if extent == 1:  # never taken
            stride = tensor.itemsize
        if stride % tensor.itemsize != 0:
            raise InvalidArgument(f"{argument}: strides must be whole elements of {tensor.itemsize} bytes, "
                                  f"one is {stride} bytes")
        strides.append(stride // tensor.itemsize)
    if kind == "numpy" and write and not tensor.flags.writeable:
        raise InvalidArgument(f"{argument}: must be writable, the array is read-only")
    pointer = tensor.ctypes.data if kind == "numpy" else tensor.data.ptr
    return _core.tensor(pointer, dtype_name(argument, tensor.dtype), list(tensor.shape) or [1], strides or [1],
                        kind == "cupy", 0 if kind == "numpy" else tensor.device.id)


def _capsule(argument, tensor, stream):
    """What `__dlpack__` gives, asked once. On a GPU the producer makes its memory ready for `stream`."""
    try:
        on_cuda = tensor.__dlpack_device__()[0] in (2, 13)
    except Exception as error:
        raise ArgumentTypeError(f"{argument}: {type(tensor).__name__}.__dlpack_device__ fails: {shown(error)}") from error
    options = {"stream": stream or 1} if on_cuda else {}  # 1 is the default stream
    try:
        try:
            return tensor.__dlpack__(**options, max_version=(1, 1))
        except TypeError as error:
            if "max_version" not in str(error):
                raise
            return tensor.__dlpack__(**options)  # a producer of the protocol's first version
    except Exception as error:
        raise ArgumentTypeError(f"{argument}: {type(tensor).__name__}.__dlpack__ fails: {shown(error)}") from error


def view(argument, tensor, *, write=False, scalar=False, stream=0):
    """A `_core.Tensor`, and what keeps its memory alive. `scalar`: no dimensions are as good as [1]."""
    kind = framework(tensor)
    if kind is None:
        raise ArgumentTypeError(f"{argument}: must be a tensor (torch, numpy, cupy, jax, or anything with "
                                f"__dlpack__), is {type(tensor).__name__}")
    if kind in ("torch", "numpy", "cupy"):
        if kind == "torch" and tensor.is_nested:  # which has no shape
            raise ArgumentTypeError(f"{argument}: must be a dense tensor, is nested")
        _check_rank(argument, tensor.ndim, scalar)
        described = _torch_view(argument, tensor) if kind == "torch" else _array_view(argument, tensor, kind, write)
        return described, tensor
    if kind == "jax" and write:
        raise ArgumentTypeError(f"{argument}: arrays of jax cannot be written to")
    try:
        imported = _core.import_dlpack(_capsule(argument, tensor, stream))
    except ArgumentTypeError:
        raise
    except InvalidArgument as error:
        raise ArgumentTypeError(f"{argument}: {type(tensor).__name__}: {error}") from error
    _check_rank(argument, imported.rank, scalar)
    if write and imported.read_only:
        raise InvalidArgument(f"{argument}: must be writable, the tensor is read-only")
    return imported.view, imported


def stream_of(tensor):
    """The framework's current stream for the tensor's device, an integer; None where there is none."""
    kind = framework(tensor)
    if kind == "torch" and tensor.is_cuda:
        return sys.modules["torch"].cuda.current_stream(tensor.device).cuda_stream
    if kind == "cupy":
        return sys.modules["cupy"].cuda.get_current_stream(tensor.device.id).ptr
    return None


def empty_like(tensor, shape, dtype):
    """A new tensor of the same framework and device. `dtype` is a name such as 'bf16'."""
    kind = framework(tensor)
    long_name = _LONG_NAMES[dtype]
    if kind == "torch":
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, long_name), device=tensor.device)
    try:
        if kind == "cupy":
            cupy = sys.modules["cupy"]
            with tensor.device:
                return cupy.empty(shape, dtype=_numpy_dtype(long_name))
        if kind == "numpy":
            return numpy.empty(shape, dtype=_numpy_dtype(long_name))
    except MemoryError as error:
        raise OutOfMemory(f"could not allocate {tuple(shape)} of {dtype}: {error}") from error
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


def exported(core_tensor, owner, kind, *, read_only=False):
    """Memory of the library as a tensor of the framework `kind`; it keeps `owner` alive. torch and cupy know no
    read-only tensors."""
    if kind in ("torch", "cupy"):
        return sys.modules[kind].from_dlpack(_Exported(core_tensor, owner))
    array = (_core.export_numpy_read_only if read_only else _core.export_numpy)(core_tensor, owner)
    return array.view(_numpy_dtype("bfloat16")) if core_tensor.dtype == "bf16" else array


def integer(argument, value):
    """A Python integer that fits 64 bits."""
    try:
        if isinstance(value, bool):  # which is an integer to Python, and a slip here
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ArgumentTypeError(f"{argument}: must be an integer, is {type(value).__name__}") from None
    if not -2**63 <= number < 2**63:
        raise InvalidArgument(f"{argument}: {shown(number)} does not fit 64 bits")
    return number


def real(argument, value):
    """A finite number of f32's range, as a Python float."""
    if not isinstance(value, (numbers.Real, numpy.integer, numpy.floating)) or isinstance(value, bool):
        # A tensor without dimensions is no number here: reading one from a GPU would synchronise.
        raise ArgumentTypeError(f"{argument}: must be a number, is {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) < _LARGEST_F32:
        raise InvalidArgument(f"{argument}: must be a finite number of f32's range, is {shown(value)}")
    return number


def flag(argument, value):
    if not isinstance(value, (bool, numpy.bool_)):
        raise ArgumentTypeError(f"{argument}: must be True or False, is {shown(value)}")
    return bool(value)


def device_of(argument, device):
    """(on_cuda, index or None) of 'cpu', 'cuda', 'cuda:1', or a torch.device."""
    found = re.fullmatch(r"cpu(?::0)?|cuda(?::([0-9]{1,4}))?", str(device))
    if found is None:
        raise InvalidArgument(f"{argument}: must be cpu, cuda or cuda:<index>, is {shown(str(device))}")
    return found[0].startswith("cuda"), None if found[1] is None else int(found[1])


def host_integers(argument, values):
    """[n] i64 of numpy from a sequence, array or tensor of any integer type. Always a copy: what it is checked for and
    what it is used for are then the same, whoever writes to `values` meanwhile."""
    kind = framework(values)
    _refuse_masked(argument, values)
    try:
        if kind == "torch":
            values = values.detach().cpu().numpy()
        elif kind == "cupy":
            values = values.get()
        array = numpy.asarray(values)
        if array.dtype.kind == "f" and isinstance(values, (list, tuple)) and all(
                isinstance(value, numbers.Integral) for value in values):
            array = numpy.array([int(value) for value in values], numpy.int64)  # numpy mixes u64 and i64 to f64
    except Exception as error:  # ragged lists, and whatever a caller's own sequence raises
        raise ArgumentTypeError(f"{argument}: must be a sequence or tensor of integers: {shown(error)}") from error
    if array.ndim != 1:
        raise InvalidArgument(f"{argument}: must have one dimension, has {array.ndim}")
    if array.size == 0:
        return numpy.zeros(0, numpy.int64)
    if array.dtype.kind == "O" and all(isinstance(value, numbers.Integral) for value in array):
        raise InvalidArgument(f"{argument}: {shown(max(array, key=abs))} does not fit 64 bits")
    if array.dtype.kind not in "iu":
        raise ArgumentTypeError(f"{argument}: must be integers, are {array.dtype}")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and int(array.max()) > 2**63 - 1:
        raise InvalidArgument(f"{argument}: {int(array.max())} is larger than 2^63 - 1")
    try:
        return numpy.array(array, dtype=numpy.int64, order="C")
    except MemoryError as error:
        raise OutOfMemory(f"{argument}: could not be copied: {error}") from error


class Call:
    """Arguments of one call: views, what keeps them alive, and options.

    `tensors` are those that may say which stream is current; the first of torch or cupy on a GPU does.
    """

    def __init__(self, *tensors, backend=None, strict=False, status=None, batch_invariant=False, workspace=None):
        self.keep = []
        options = _core.Options()
        if backend is not None:
            if not isinstance(backend, str):
                raise ArgumentTypeError(f"backend: must be a name, is {type(backend).__name__}")
            if not backend.isascii():
                raise InvalidArgument(f"backend: no backend is called {shown(backend)}")
            options.backend = backend
        options.strict = flag("strict", strict)
        options.batch_invariant = flag("batch_invariant", batch_invariant)
        options.stream = next((s for s in map(stream_of, tensors) if s is not None), 0)
        self.options = options
        self._status, self._workspace = status, workspace

    def view(self, argument, tensor, *, write=False, scalar=False):
        described, owner = view(argument, tensor, write=write, scalar=scalar, stream=self.options.stream)
        self.keep.append(owner)
        return described

    def maybe(self, argument, tensor, *, write=False):
        return None if tensor is None else self.view(argument, tensor, write=write)

    def _beside(self, argument, described, first):
        """The library sees an address only: that it lies where the tensors do is checked here."""
        if described.on_cuda != first.on_cuda or described.device_index != first.device_index:
            def name(t):
                return f"cuda:{t.device_index}" if t.on_cuda else "cpu"
            raise InvalidArgument(f"{argument}: must be on {name(first)}, is on {name(described)}")
        return described

    def scale(self, argument, scale, first):
        """None, a number, or a tensor of one f32 on the device of `first`."""
        if scale is None:
            return None
        if framework(scale) is None or isinstance(scale, numpy.generic):
            return real(argument, scale)
        described = self._beside(argument, self.view(argument, scale, scalar=True), first)
        if described.dtype != "f32" or math.prod(described.shape) != 1:
            raise InvalidArgument(f"{argument}: a tensor must hold one f32, is {described.dtype} {described.shape}")
        return described

    def set_workspace(self, workspace, first):
        described = self._beside("workspace", self.view("workspace", workspace, write=True), first)
        if not described.is_contiguous:
            raise InvalidArgument(f"workspace: must be contiguous, has shape {described.shape} with strides "
                                  f"{described.strides}")
        self.options.workspace = described.pointer
        self.options.workspace_bytes = described.bytes

    def finish_options(self, first):
        """The options, with status and workspace checked to lie on the device of `first`."""
        if self._status is not None:
            word = self._beside("status", self.view("status", self._status, write=True), first)
            if word.dtype != "i32" or word.shape != [1] or word.pointer % 4 != 0:
                raise InvalidArgument(f"status: must be i32 [1], aligned, is {word.dtype} {word.shape}")
            self.options.status = word.pointer
        if self._workspace is not None:
            self.set_workspace(self._workspace, first)
        return self.options
