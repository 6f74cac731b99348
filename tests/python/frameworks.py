"""Arrays of numpy as tensors of the frameworks, and back. Frameworks are imported where they are used."""

import os

import numpy

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # jax shares the GPU with the others


def torch_tensor(array, device="cpu"):
    """A torch tensor with the array's bits; torch takes no bf16 and f8 from numpy."""
    import torch

    name = array.dtype.name
    if name == "bfloat16":
        return torch.from_numpy(array.view(numpy.int16).copy()).view(torch.bfloat16).to(device)
    if name == "float8_e4m3fn":
        return torch.from_numpy(array.view(numpy.uint8).copy()).view(torch.float8_e4m3fn).to(device)
    return torch.from_numpy(array.copy()).to(device)


def torch_host(value):
    return value.detach().float().cpu().numpy()


def cupy_array(array):
    """cupy has no f8: its bits as u8, which octopage takes for a cache."""
    import cupy

    return cupy.asarray(array.view(numpy.uint8) if array.dtype.name == "float8_e4m3fn" else array)


def jax_array(array):
    import jax

    bits = array.view(numpy.uint8) if array.dtype.name == "float8_e4m3fn" else array
    return jax.device_put(bits, jax.devices("gpu")[0])
