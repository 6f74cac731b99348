"""Step files as numpy arrays, and a float64 reference of the contract in a few lines."""

import json
import pathlib

import ml_dtypes
import numpy

CASES = sorted((pathlib.Path(__file__).resolve().parents[1] / "cases").glob("*.safetensors"))
DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": numpy.float16, "F32": numpy.float32, "F8_E4M3": ml_dtypes.float8_e4m3fn,
          "U8": numpy.uint8, "I32": numpy.int32, "I64": numpy.int64}


class Step:
    """The tensors of a file by name, `metadata` included; memory is 64-byte aligned."""

    def __init__(self, path):
        raw = pathlib.Path(path).read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:8 + size])
        self.metadata = header.pop("__metadata__")
        self.names = list(header)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            memory = numpy.zeros(end - begin + 64, numpy.uint8)
            at = -memory.ctypes.data % 64
            memory[at:at + end - begin] = numpy.frombuffer(raw, numpy.uint8, end - begin, 8 + size + begin)
            data = memory[at:at + end - begin].view(DTYPES[entry["dtype"]])
            setattr(self, name, data.reshape(entry["shape"]))
        self.scale = float(self.metadata["scale"])
        f8 = self.kv_cache.dtype == ml_dtypes.float8_e4m3fn or self.kv_cache.dtype == numpy.uint8
        self.k_scale = float(self.metadata["k_scale"]) if f8 else None
        self.v_scale = float(self.metadata["v_scale"]) if f8 else None

    def inputs(self):
        return self.query, self.kv_cache, self.block_table, self.owners, self.positions, self.regions

    @property
    def groups(self):
        return self.kv_cache.shape[1]

    def group_regions(self, group):
        return self.regions if self.regions.ndim == 2 else self.regions[:, group]

    def group_heads(self, group):
        heads = self.query.shape[1] // self.groups
        return slice(group * heads, (group + 1) * heads)


def tolerance(*arrays):
    return 4e-3 if any(a.dtype == ml_dtypes.bfloat16 for a in arrays) else 1e-3


def assert_close(output, lse, expected_output, expected_lse, bound):
    output, expected = numpy.asarray(output, numpy.float64), numpy.asarray(expected_output, numpy.float64)
    norm = numpy.linalg.norm(expected, axis=-1)
    error = numpy.linalg.norm(output - expected, axis=-1)
    assert (error <= bound * norm + (norm == 0) * 1e-30).all(), (error / numpy.maximum(norm, 1e-30)).max()
    if lse is not None:
        finite = numpy.isfinite(expected_lse)
        assert (lse[~finite] == expected_lse[~finite]).all()
        difference = numpy.abs(lse[finite].astype(numpy.float64) - expected_lse[finite])
        assert (difference <= numpy.maximum(2e-3, 1e-5 * numpy.abs(expected_lse[finite]))).all()


def attention(query, cache, table, owners, positions, regions, scale):
    """[rows, heads, dim] and [rows, heads] in float64, one group, caches of bf16 or f16."""
    rows, heads, dim = query.shape
    block_size = cache.shape[2]
    output, lse = numpy.zeros((rows, heads, dim)), numpy.full((rows, heads), -numpy.inf)
    for row in range(rows):
        position = int(positions[row])
        if position < 0:
            continue
        tokens = []
        for region in regions[row, :min(position // 8 + 1, regions.shape[1])]:
            block = table[owners[row], 8 * region // block_size]
            first = 8 * int(region) % block_size
            for t in range(8):
                if 8 * region + t <= position:
                    tokens.append(cache[block, 0, first + t])
        kv = numpy.array(tokens).astype(numpy.float64)
        scores = scale * query[row].astype(numpy.float64) @ kv[:, :dim].T
        top = scores.max(axis=1, keepdims=True)
        weights = numpy.exp(scores - top)
        total = weights.sum(axis=1, keepdims=True)
        output[row] = weights @ kv[:, dim:] / total
        lse[row] = (top + numpy.log(total))[:, 0]
    return output, lse
