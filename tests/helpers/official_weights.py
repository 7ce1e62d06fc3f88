"""Dequantises matrices with the formats' own packages, in an environment without icejax: official_weights.py FOLDER.

FOLDER has a .safetensors and a .json (format, quantisation arguments) per matrix; the fp32 weights are written as .found files.
"""

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file


def weights(tensors: dict[str, torch.Tensor], format: str, options: dict) -> torch.Tensor:
    """Returns the fp32 matrix; 16-bit scales are widened, since the packages return weights in the dtype of the scales."""
    tensors = {name: part.float() if part.dtype in (torch.bfloat16, torch.float16) else part for name, part in tensors.items()}
    if format == "awq":  # run one file: importing the package needs names that transformers removed
        folder = importlib.util.find_spec("awq").submodule_search_locations[0]
        awq = runpy.run_path(f"{folder}/utils/packing_utils.py")
        return awq["dequantize_gemm"](*(tensors[name] for name in ("qweight", "qzeros", "scales")), 4, options["group_size"]).T
    args = QuantizationArgs(**options)
    if format.startswith("nvfp4"):  # its decompressor returns bf16, so call its parts
        packed, scales = tensors["weight_packed"], tensors["weight_scale"].float()
        codes = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], dtype=torch.float32)
        return dequantize(codes, scales, args=args, global_scale=tensors["weight_global_scale"], dtype=torch.float32)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=format)
    return BaseCompressor.get_value_from_registry(format).decompress(tensors, scheme)["weight"].float()


for file in sorted(Path(sys.argv[1]).glob("*.json")):
    job = json.loads(file.read_text())
    weight = weights(load_file(file.with_suffix(".safetensors")), job["format"], job["weights"])
    save_file({"weight": weight.contiguous()}, file.with_suffix(".found"))
