#!/usr/bin/env python3
"""Makes the files beside it, with the `gguf` package as the authority.

    pip install gguf==0.19.0 && python make.py

Seeded: running it again changes nothing. Files:
    types.txt               ggml's tensor types: id, name, elements and bytes of a block
    dequant.txt             per type a line: name, random blocks, their values as f32 (both hexadecimal, little-endian)
    whole.gguf              one key of every type, tensors of several types, alignment 64
    whole.txt               what the package's reader finds in it
    split-0000?-of-00003.gguf   a model in three files
"""

import logging
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T, GGUFReader, GGUFValueType as V, GGUFWriter, quants

HERE = Path(__file__).parent
rng = np.random.default_rng(20260901)

# Where f16 scales stand in a block. They are made finite: what a NaN turns into differs between processors.
SCALES = {
    T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.Q2_K: [80, 82], T.Q3_K: [108],
    T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208], T.IQ4_NL: [0], T.IQ4_XS: [0], T.MXFP4: [],
}
# Added later, with a generator of their own so that what was there stays as it was.
LATER = {
    T.IQ1_S: [0], T.IQ1_M: [], T.IQ2_XXS: [0], T.IQ2_XS: [0], T.IQ2_S: [0], T.IQ3_XXS: [0], T.IQ3_S: [0],
    T.TQ1_0: [52], T.TQ2_0: [64], T.NVFP4: [],
}
# Zero, minus zero, the smallest and largest subnormal, the largest, and some that models have.
EDGE = np.array([0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x211F, 0xA84C], dtype=np.uint16)


def finite_f16(n):
    bits = rng.integers(0, 1 << 16, n, dtype=np.uint16)
    return np.where((bits & 0x7C00) == 0x7C00, bits & 0x83FF, bits).astype(np.uint16)


def blocks(t):
    """A few random blocks of type t."""
    elems, size = GGML_QUANT_SIZES[t]
    if t == T.F32:
        bits = rng.integers(0, 1 << 32, 32, dtype=np.uint32)
        return np.where((bits & 0x7F800000) == 0x7F800000, bits & 0x807FFFFF, bits).astype("<u4").view(np.uint8)
    if t == T.BF16:
        bits = rng.integers(0, 1 << 16, 64, dtype=np.uint16)
        return np.where((bits & 0x7F80) == 0x7F80, bits & 0x807F, bits).astype("<u2").view(np.uint8)
    if t == T.F16:
        return np.concatenate([EDGE, finite_f16(56)]).astype("<u2").view(np.uint8)
    n = 3 if elems == 256 else 10
    out = rng.integers(0, 256, (n, size), dtype=np.uint8)
    for at in (SCALES | LATER)[t]:
        scales = finite_f16(n)
        if n == 10:
            scales[: len(EDGE)] = np.roll(EDGE, at)
        else:
            scales[0] = EDGE[6]
        out[:, at : at + 2] = scales.astype("<u2").view(np.uint8).reshape(n, 2)
    if t == T.MXFP4:
        out[:4, 0] = [0, 1, 2, 255]
    if t == T.NVFP4:
        out[0, :4], out[1, :4] = [0, 1, 7, 8], [0x7E, 0x7F, 0x80, 0xFF]
    if t == T.IQ1_M:
        out[:, 55] &= 0xBF  # the f16 scale, in four pieces: an exponent that is not all ones
    return out.reshape(-1)


def dequant():
    global rng
    first, later = rng, np.random.default_rng(20261130)
    with open(HERE / "dequant.txt", "w") as f:
        for t in [T.F32, T.F16, T.BF16, *SCALES, *LATER]:
            rng = later if t in LATER else first
            b = blocks(t)
            with np.errstate(over="ignore"):  # the largest MXFP4 scale gives infinities
                y = quants.dequantize(b, t)
            assert y.dtype == np.float32 and not np.isnan(y).any(), t
            print(t.name, b.tobytes().hex(), y.astype("<f4").tobytes().hex(), file=f)
    rng = first


def types():
    with open(HERE / "types.txt", "w") as f:
        for t, (elems, size) in sorted(GGML_QUANT_SIZES.items()):
            print(t.value, t.name, elems, size, file=f)


def whole():
    path = HERE / "whole.gguf"
    w = GGUFWriter(path, "llama")
    w.add_custom_alignment(64)
    w.add_uint8("t.u8", 255)
    w.add_int8("t.i8", -128)
    w.add_uint16("t.u16", 65535)
    w.add_int16("t.i16", -32768)
    w.add_uint32("t.u32", 4294967295)
    w.add_int32("t.i32", -2147483648)
    w.add_uint64("t.u64", 18446744073709551615)
    w.add_int64("t.i64", -9223372036854775808)
    w.add_float32("t.f32", 0.1)
    w.add_float64("t.f64", 0.1)
    w.add_bool("t.true", True)
    w.add_bool("t.false", False)
    w.add_string("t.str", "grüße, 世界")
    w.add_array("a.str", ["x", "", "▁the", "\n"])
    w.add_array("a.bool", [True, False, True])
    for name, sub, values in [
        ("a.u8", V.UINT8, [0, 1, 255]),
        ("a.i8", V.INT8, [-128, 127]),
        ("a.u16", V.UINT16, [0, 65535]),
        ("a.i16", V.INT16, [-32768, 32767]),
        ("a.u32", V.UINT32, [0, 4294967295]),
        ("a.i32", V.INT32, [-1, 0, 1]),
        ("a.u64", V.UINT64, [18446744073709551615]),
        ("a.i64", V.INT64, [-9223372036854775808, 1]),
        ("a.f32", V.FLOAT32, [0.5, -1.25, 3.0]),
        ("a.f64", V.FLOAT64, [0.5, -1.25]),
    ]:
        w.add_key_value(name, values, V.ARRAY, sub_type=sub)
    w.add_tensor("norm.weight", np.arange(5, dtype=np.float32))
    w.add_tensor("half.weight", np.arange(24, dtype=np.float16).reshape(2, 3, 4))
    for t, rows, row in [(T.Q4_1, 2, 64), (T.Q8_0, 3, 32), (T.Q4_K, 1, 256), (T.Q6_K, 1, 256), (T.BF16, 2, 3)]:
        elems, size = GGML_QUANT_SIZES[t]
        data = rng.integers(0, 64, (rows, row // elems * size), dtype=np.uint8)
        w.add_tensor(f"{t.name.lower()}.weight", data, raw_dtype=t)
    w.add_tensor("ids", np.array([1, -2, 3], dtype=np.int32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()

    r = GGUFReader(path)
    with open(HERE / "whole.txt", "w") as f:
        for name, field in r.fields.items():
            if name.startswith("GGUF."):
                continue
            value = field.contents()
            kind = field.types[0].name
            if kind == "ARRAY":
                kind = f"ARRAY {field.types[1].name}"
            items = value if isinstance(value, list) else [value]
            shown = [i.encode().hex() if isinstance(i, str) else np.float64(i).tobytes().hex()
                     if isinstance(i, float) else str(int(i)) for i in items]
            print("key", name, kind.lower().replace(" ", ":"), ",".join(shown), file=f)
        for t in r.tensors:
            shape = "x".join(str(int(n)) for n in t.shape)
            print("tensor", t.name, t.tensor_type.name, shape, t.data_offset, t.n_bytes, file=f)


def split():
    w = GGUFWriter(HERE / "split.gguf", "llama", split_max_tensors=2)
    w.add_name("in three files")
    for i in range(5):
        w.add_tensor(f"blk.{i}.weight", np.full((2, 3), i, dtype=np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    types()
    dequant()
    whole()
    split()
