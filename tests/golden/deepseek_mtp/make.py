"""Writes this fixture: a small DeepSeek-V3 with a module of multi-token prediction, trained on texts that can be foretold, and what it computes.

usage: make.py OUT           trains the model and writes config.json, model.safetensors and golden.safetensors
       make.py OUT --check   computes golden.safetensors again from OUT's weights and says how far it is from the file

The model is transformers' (eager); the module is written out here after the paper (arXiv 2412.19437, section 2.2) with one of its
decoder layers. With the libraries of scripts/setup-cache.sh (torch 2.15, transformers 5.23) the files come out bit for bit.

golden.safetensors: `input_ids` i64 [2, 32]; `logits` f32 [2, 32, 64] of the model; `mtp.logits` f32 [2, 31, 64] of the module at the tokens
behind the first, from the model's states; `mtp.next` f32 [2, 64] behind the module's own last proposal, from its own last state.
"""
import argparse
import json
import pathlib

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3ForCausalLM, DeepseekV3RMSNorm

VOCAB, HIDDEN, LAYERS, EXPERT = 64, 32, 2, 16
STEPS = 240
# Fields of the configuration as published checkpoints have them.
FIELDS = """architectures model_type vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size
moe_intermediate_size n_routed_experts num_experts_per_tok n_shared_experts n_group topk_group first_k_dense_replace q_lora_rank kv_lora_rank
qk_nope_head_dim qk_rope_head_dim v_head_dim max_position_embeddings routed_scaling_factor rope_theta rms_norm_eps norm_topk_prob
rope_interleave tie_word_embeddings""".split()


class Module(torch.nn.Module):
    """A module of multi-token prediction; embedding and head are the model's."""

    def __init__(self, model):
        super().__init__()
        self.shared = [model]  # In a list, so that its parameters are not this module's.
        self.enorm, self.hnorm, self.norm = (DeepseekV3RMSNorm(HIDDEN, 1e-6) for _ in range(3))
        self.eh_proj = torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.block = DeepseekV3DecoderLayer(model.config, LAYERS)

    def forward(self, ids, hidden):
        """Logits and states. `ids` [b, s] are the tokens behind those of `hidden` [b, s, HIDDEN], the model's behind its last norm."""
        (model,) = self.shared
        x = self.eh_proj(torch.cat([self.enorm(model.model.embed_tokens(ids)), self.hnorm(hidden)], -1))
        n = x.shape[1]
        at = torch.arange(n)[None]
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        y = self.block(x, attention_mask=mask, position_embeddings=model.model.rotary_emb(x, at), position_ids=at)
        y = self.norm(y[0] if isinstance(y, tuple) else y)
        return model.lm_head(y), y


def made():
    """Model and module of random weights, in the order of draws that the fixture was made with."""
    config = DeepseekV3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=2, intermediate_size=48,
        moe_intermediate_size=EXPERT, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=2, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
        max_position_embeddings=128, routed_scaling_factor=2.5, rope_theta=10000.0, rms_norm_eps=1e-6, bos_token_id=None, eos_token_id=None,
        pad_token_id=None, tie_word_embeddings=False, initializer_range=0.2)
    config._attn_implementation = config._experts_implementation = "eager"
    model = DeepseekV3ForCausalLM(config).float()
    module = Module(model)
    for part in (model, module):
        for p in part.parameters():
            if p.dim() > 1:
                torch.nn.init.normal_(p, std=0.15)
        for name, buffer in part.named_buffers():
            if "correction" in name:
                buffer.copy_(torch.randn_like(buffer) * 0.05)
    return model, module


def texts():
    """A function that draws a text: twelve words of five tokens in any order, from within a word to within another."""
    words = [[int(x) for x in torch.randint(0, VOCAB, (5,))] for _ in range(12)]

    def text(n):
        tokens = []
        while len(tokens) < n:
            tokens += words[int(torch.randint(0, 12, (1,)))]
        first = int(torch.randint(0, 5, (1,)))
        return tokens[first:n - 5 + first]

    return text


def train(model, module, text):
    """Both heads at once, the module's at half the weight."""
    optimizer = torch.optim.AdamW([*model.parameters(), *module.parameters()], lr=5e-3, weight_decay=0)
    loss = lambda logits, ids: torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), ids.reshape(-1))
    for step in range(STEPS):
        ids = torch.tensor([text(45) for _ in range(16)])
        hidden = model.model(ids, use_cache=False).last_hidden_state
        first = loss(model.lm_head(hidden)[:, :-1], ids[:, 1:])
        second = loss(module(ids[:, 1:], hidden[:, :-1])[0][:, :-1], ids[:, 2:])
        optimizer.zero_grad()
        (first + 0.5 * second).backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: {first.item():.4f}, the module {second.item():.4f}", flush=True)


@torch.no_grad()
def computed(model, module, ids):
    """The tensors of golden.safetensors."""
    hidden = model.model(ids, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden)
    second, states = module(ids[:, 1:], hidden[:, :-1])
    following = second[:, -1].argmax(-1, keepdim=True)
    behind, _ = module(torch.cat([ids[:, 1:], following], 1), torch.cat([hidden[:, :-1], states[:, -1:]], 1))
    tensors = {"input_ids": ids, "logits": logits, "mtp.logits": second, "mtp.next": behind[:, -1]}
    return {name: t.contiguous() for name, t in tensors.items()}


def stored_name(name):
    """What checkpoints call a tensor of the module."""
    name = name.removeprefix("block.")
    return f"model.layers.{LAYERS}." + (f"shared_head.{name}" if name.startswith("norm.") else name)


def checkpoint(model, module):
    """Tensors as published checkpoints have them: experts apart, and the module's own copies of embedding and head."""
    stored = dict(model.state_dict()) | {stored_name(name): t for name, t in module.state_dict().items()}
    for name in [name for name in stored if ".mlp.experts." in name]:
        stacked, (base, kind) = stored.pop(name), name.rsplit(".", 1)
        for e, tensor in enumerate(stacked):
            parts = {"gate_proj": tensor[:EXPERT], "up_proj": tensor[EXPERT:]} if kind == "gate_up_proj" else {"down_proj": tensor}
            stored |= {f"{base}.{e}.{part}.weight": t for part, t in parts.items()}
    stored[f"model.layers.{LAYERS}.embed_tokens.weight"] = model.model.embed_tokens.weight
    stored[f"model.layers.{LAYERS}.shared_head.head.weight"] = model.lm_head.weight
    return {name: t.detach().clone().contiguous() for name, t in stored.items()}


def load(model, module, tensors):
    """Puts a checkpoint's tensors where `checkpoint` took them from."""
    for part, stored in ((model, lambda name: name), (module, stored_name)):
        state = part.state_dict()
        for name, tensor in state.items():
            base, kind = stored(name).rsplit(".", 1)
            one = lambda e, part: tensors[f"{base}.{e}.{part}.weight"]
            if kind == "gate_up_proj":
                whole = torch.stack([torch.cat([one(e, "gate_proj"), one(e, "up_proj")]) for e in range(len(tensor))])
            elif kind == "down_proj":
                whole = torch.stack([one(e, kind) for e in range(len(tensor))])
            else:
                whole = tensors[stored(name)]
            tensor.copy_(whole)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--check", action="store_true")
    a = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model, module = made()
    if a.check:
        load(model, module, load_file(a.out / "model.safetensors"))
        want = load_file(a.out / "golden.safetensors")
        got = computed(model.eval(), module.eval(), want["input_ids"])
        assert want.keys() == got.keys(), (want.keys(), got.keys())
        for name, tensor in want.items():
            print(f"{name} {list(tensor.shape)}: off by {(got[name] - tensor).abs().max().item():.2g} of {tensor.abs().max().item():.3g}")
        return
    text = texts()
    train(model, module, text)
    golden = computed(model.eval(), module.eval(), torch.tensor([text(37), text(37)]))
    a.out.mkdir(parents=True, exist_ok=True)
    save_file(checkpoint(model, module), a.out / "model.safetensors", metadata={"format": "pt"})
    save_file(golden, a.out / "golden.safetensors")
    fields = model.config.to_dict() | {"architectures": ["DeepseekV3ForCausalLM"], "rope_theta": 10000.0}
    config = {key: fields.get(key) for key in FIELDS} | {"num_nextn_predict_layers": 1, "torch_dtype": "float32"}
    (a.out / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    main()
