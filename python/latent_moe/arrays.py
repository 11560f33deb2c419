"""What counts as an array, and where its rows lie.

| array | goes in as |
| --- | --- |
| PyTorch tensor | its pointer, in its own dtype |
| NumPy `ml_dtypes.bfloat16`, `float8_e4m3fn` | raw bits; the dtype's name says what they are |
| NumPy `uint16`, `int16` | raw bits of the 16-bit dtype that the place expects |
| NumPy `float16`, `float32`, and anything else with DLPack | in its own dtype |

Nothing is ever copied or converted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from latent_moe import _core

Array = Any
"""A two-dimensional array whose rows are contiguous: see the module's table."""

_ML_DTYPES = {"bfloat16": ("bf16", np.uint16), "float8_e4m3fn": ("e4m3", np.uint8)}
_TORCH_NAMES = {
    "torch.bfloat16": "bf16",
    "torch.float16": "f16",
    "torch.float32": "f32",
    "torch.float8_e4m3fn": "e4m3",
    "torch.int32": "i32",
    "torch.uint16": "u16",
    "torch.int16": "u16",
    "torch.uint8": "u8",
}
# Both are filled on first sight: a dtype's name takes a microsecond.
_torch_dtypes: dict[Any, str] = {}
_torch_classes: dict[type, bool] = {}


def _see_class(cls: type) -> bool:
    """Whether it is a class of PyTorch's. Its plain tensors are read in C++ from then on, if that PyTorch lets them."""
    found = _torch_classes[cls] = cls.__module__.partition(".")[0] == "torch"
    table = getattr(cls, "__dlpack_c_exchange_api__", None)
    if found and cls.__name__ in ("Tensor", "Parameter") and table is not None:
        _core.add_tensor_class(cls, table)
    return found


def is_torch(array: Array) -> bool:
    """Whether `array` is a PyTorch tensor, without importing PyTorch."""
    found = _torch_classes.get(type(array))
    return _see_class(type(array)) if found is None else found


def torch_dtype_name(dtype: Any) -> str:
    name = _torch_dtypes.get(dtype)
    if name is None:
        name = _torch_dtypes[dtype] = _TORCH_NAMES.get(str(dtype), str(dtype))
    return name


def dtype_name(array: Array) -> str:
    """`bf16`, `f16`, `f32`, `e4m3`; `u16` and `u8` for raw bits."""
    return view(array).dtype


def torch_view(tensor: Array) -> _core.View:
    """The rows of a PyTorch tensor, by its pointer: DLPack would take ten times as long."""
    shape = tensor.shape
    if len(shape) == 2:
        rows, columns = shape
        stride, step = tensor.stride()
    elif len(shape) == 1:
        rows, columns, stride, (step,) = 1, shape[0], shape[0], tensor.stride()
    else:
        raise TypeError(f"a tensor has {len(shape)} dimensions, expected [rows, columns]")
    if step != 1 and columns > 1:
        raise TypeError(f"the elements of a row are {step} apart, expected them side by side")
    device = "cpu" if tensor.device.type == "cpu" else "gpu"
    return _core.view_at(tensor.data_ptr(), rows, columns, stride, torch_dtype_name(tensor.dtype), device, tensor)


def view(array: Array) -> _core.View:
    """The rows of any array."""
    if is_torch(array):
        return torch_view(array)
    if isinstance(array, np.ndarray):
        special = _ML_DTYPES.get(array.dtype.name)
        if special is not None:
            name, bits = special
            raw = _core.view(array.view(bits))
            return raw.named(name)
    return _core.view(array)


def optional_view(array: Array | None) -> _core.View | None:
    return None if array is None else view(array)


def row_count(what: str, array: Array) -> int:
    """How many rows `array` has; a flat one is one row."""
    shape = getattr(array, "shape", None)
    if not shape or not isinstance(shape, tuple):
        raise TypeError(f"{what} is {type(array).__name__}, expected an array [rows, columns]")
    return shape[0] if len(shape) > 1 else 1


def empty_like(array: Array, rows: int, columns: int) -> Array:
    """A new array of another shape, of the same library, dtype and device."""
    if is_torch(array):
        return array.new_empty((rows, columns))
    if isinstance(array, np.ndarray):
        return np.empty((rows, columns), array.dtype)
    raise TypeError(f"out: cannot make an array like {type(array).__name__}, expected one to write to")


def wait_for(*arrays: Array | None) -> None:
    """Until what PyTorch's current streams still compute of them is there: packing reads them on a stream of its own."""
    for array in arrays:
        if array is not None and is_torch(array) and array.device.type != "cpu":
            import torch

            torch.cuda.current_stream(array.device).synchronize()


def stream_of(array: Array, stream: int | None) -> int:
    """`stream`, or the current stream of a PyTorch tensor's device; 0 on the CPU."""
    if stream is not None:
        return stream
    if is_torch(array) and array.device.type != "cpu":
        from latent_moe import torch as adapter

        return adapter.current_stream(array.device)
    return 0


_core.set_array_functions(view, stream_of)
