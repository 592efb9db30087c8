"""Writes this fixture: small models of several architectures as GGUF files by llama.cpp's own converter, and their logits by transformers.

usage: make.py OUT LLAMA_CPP    LLAMA_CPP is a folder with llama.cpp's `conversion` and `gguf-py`, as the PyPI source package llama-cpp-python has

Weights are random; norms are not 1. What a GGUF file leaves out (scale of the scores, places of windows) is as llama.cpp has it. The vocabulary is
made up; the converter takes it in place of a tokenizer's. golden.safetensors: `input_ids` i64 [2, 13]; of each file `<file>.logits` f32 [2, 13, 96] and
`<file>.dequantised`, the numbers of the tensor that golden.json names.
"""
import json
import pathlib
import sys
import tempfile

OUT, LLAMA_CPP = map(pathlib.Path, sys.argv[1:3])
sys.path[:0] = [str(LLAMA_CPP), str(LLAMA_CPP / "gguf-py")]

import gguf
import torch
import transformers
from conversion import get_model_class
from conversion.base import ModelBase, ModelType
from safetensors.torch import load_file, save_file

VOCAB = 96
COMMON = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
              max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.15)
LATENTS = dict(kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24, n_routed_experts=4, num_experts_per_tok=2,
               moe_intermediate_size=32, first_k_dense_replace=1, num_key_value_heads=4, routed_scaling_factor=1.5,
               rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32, mscale=0.8,
                                    mscale_all_dim=0.8, beta_fast=32, beta_slow=1))
GPT_OSS = dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=6, rope_parameters=dict(
    rope_type="yarn", rope_theta=150000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=32))
MODELS = {
    "mixtral": ("MixtralForCausalLM", dict(num_local_experts=4, num_experts_per_tok=2), "F32"),
    "qwen3moe": ("Qwen3MoeForCausalLM", dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True), "F32"),
    "qwen3moe-q8": ("Qwen3MoeForCausalLM", dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True), "Q8_0"),
    "gemma2": ("Gemma2ForCausalLM", dict(head_dim=24, query_pre_attn_scalar=24, sliding_window=6, attn_logit_softcapping=30.0, final_logit_softcapping=20.0), "F32"),
    "gemma3": ("Gemma3ForCausalLM", dict(head_dim=24, query_pre_attn_scalar=24, sliding_window=6, num_hidden_layers=6, intermediate_size=48), "F32"),
    "phi3": ("Phi3ForCausalLM", dict(original_max_position_embeddings=128), "F16"),
    "phi3-long": ("Phi3ForCausalLM", dict(original_max_position_embeddings=32, rope_parameters=dict(
        rope_type="longrope", rope_theta=10000.0, short_factor=[1.0 + i / 10 for i in range(4)], long_factor=[2.0 + i for i in range(4)],
        original_max_position_embeddings=32)), "F32"),
    "deepseek2-lite": ("DeepseekV2ForCausalLM", dict(LATENTS, q_lora_rank=None, n_shared_experts=2, norm_topk_prob=False, n_group=1, topk_group=1, topk_method="greedy"), "F32"),
    "deepseek3": ("DeepseekV3ForCausalLM", dict(LATENTS, q_lora_rank=20, n_shared_experts=1, norm_topk_prob=True, n_routed_experts=8, n_group=4, topk_group=2), "F32"),
    "glm4": ("Glm4ForCausalLM", dict(head_dim=16, attention_bias=True), "F32"),
    "olmo2": ("Olmo2ForCausalLM", {}, "F32"),
    "gpt-oss": ("GptOssForCausalLM", GPT_OSS, "F32"),
    "gpt-oss-mxfp4": ("GptOssForCausalLM", GPT_OSS, "MXFP4"),
}
# Files name one end of texts; these end turns, too.
ENDS = ["<|end|>", "<end_of_turn>"]
TOKENS = ["<unk>", "<s>", "</s>"] + ["▁" + chr(97 + i % 26) * (1 + i // 26) for i in range(VOCAB - 5)] + ENDS


def vocabulary(self):
    w = self.gguf_writer
    w.add_tokenizer_model("llama")
    w.add_tokenizer_pre("default")
    w.add_token_list(TOKENS)
    w.add_token_scores([-float(i) for i in range(VOCAB)])
    w.add_token_types([2, 3, 3] + [1] * (VOCAB - 5) + [3, 3])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)


def mxfp4(model, folder):
    """Experts' matrices of random codes, as gpt-oss is published: in the model their numbers, in the folder blocks and scales."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    tensors = load_file(folder / "model.safetensors")
    for key, p in model.named_parameters():
        if key.endswith(("gate_up_proj", "down_proj")):
            experts, k, n = p.shape
            blocks = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 125, (experts, n, k // 32), dtype=torch.uint8)
            numbers = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], -1).reshape(experts, n, k // 32, 32)
            numbers = numbers * torch.exp2(scales.float() - 127)[..., None]
            p.copy_(numbers.reshape(experts, n, k).transpose(1, 2))
            del tensors[key]
            tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))


torch.manual_seed(7)
ids = torch.randint(3, VOCAB, (2, 13), generator=torch.Generator().manual_seed(3))
golden, entries = {"input_ids": ids}, []
for name, (kind, fields, to) in MODELS.items():
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**{**COMMON, **fields})
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key:
                p.add_(0.3 * torch.randn_like(p))
            if "correction_bias" in key:
                p.copy_(0.2 * torch.randn_like(p))
            if "sinks" in key or key.endswith(("_bias", ".bias")):
                p.copy_(0.2 * torch.randn_like(p))
        for key, b in model.named_buffers():
            if "correction_bias" in key:
                b.copy_(0.2 * torch.randn_like(b))
    file = f"{name}.gguf"
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        model.save_pretrained(folder)
        if to == "MXFP4":
            with torch.no_grad():
                mxfp4(model, folder)
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {t: i for i, t in enumerate(TOKENS)}}, "added_tokens": []}))
        hparams = ModelBase.load_hparams(folder, False)
        converter = get_model_class(hparams["architectures"][0])
        converter = type(converter.__name__, (converter,), {"set_vocab": vocabulary, "model_arch": converter.model_arch})
        ftype = {"F32": gguf.LlamaFileType.ALL_F32, "F16": gguf.LlamaFileType.MOSTLY_F16, "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0, "MXFP4": gguf.LlamaFileType.ALL_F32}[to]
        with torch.inference_mode():
            converter(folder, ftype, OUT / file, hparams=hparams).write()
    tensors = {t.name: t for t in gguf.GGUFReader(OUT / file).tensors}
    shown = next(t for n, t in tensors.items() if n.endswith(("ffn_down_exps.weight", "ffn_down.weight")))
    numbers = torch.tensor(gguf.quants.dequantize(shown.data, shown.tensor_type).reshape(list(reversed(shown.shape.tolist()))).copy())
    # The reference has the weights as the file has them.
    if to not in ("F32", "MXFP4"):
        with torch.no_grad():
            for key, p in model.named_parameters():
                if p.dim() > 1 and "norm" not in key and "mlp.gate.weight" not in key:
                    rounded = p.reshape(-1, p.shape[-1]).numpy()
                    kind = gguf.GGMLQuantizationType[to]
                    p.copy_(torch.tensor(gguf.quants.dequantize(gguf.quants.quantize(rounded, kind), kind)).reshape(p.shape))
    with torch.no_grad():
        golden[f"{file}.logits"] = model(input_ids=ids, use_cache=False).logits.float().contiguous()
    golden[f"{file}.dequantised"] = numbers.float().contiguous()
    entries.append({"file": file, "dequantised": shown.name})
save_file(golden, OUT / "golden.safetensors")
(OUT / "golden.json").write_text(json.dumps(entries, indent=1) + "\n")
