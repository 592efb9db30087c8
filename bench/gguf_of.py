"""A GGUF of a shape with random weights in bf16, for what is measured from a file: servers and llama.cpp beside each other, loading.

usage: gguf_of.py SHAPE.json OUT.gguf

Wants PyPI's numpy and gguf. Matrices are normal with a deviation of 0.02, norms are ones; the vocabulary is bytes, pairs of them and what
grows from those, by merges, so that texts have ids. llama.cpp's llama-quantize makes Q8_0 and Q4_0 of it, `astrai export` a model directory.
"""
import json, sys
import gguf, numpy as np

shape, out = sys.argv[1:]
c = json.load(open(shape))
arch = {"llama": "llama", "qwen3": "qwen3"}.get(c["model_type"]) or sys.exit(f"{shape}: no dense model of Llama's or Qwen3's kind")
hidden, heads, groups, inner = (c[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"))
layers, vocab, head = c["num_hidden_layers"], c["vocab_size"], c.get("head_dim") or hidden // heads
w = gguf.GGUFWriter(out, arch)
w.add_context_length(c["max_position_embeddings"])
w.add_embedding_length(hidden)
w.add_block_count(layers)
w.add_feed_forward_length(inner)
w.add_head_count(heads)
w.add_head_count_kv(groups)
w.add_layer_norm_rms_eps(c["rms_norm_eps"])
w.add_rope_freq_base(c["rope_theta"])
w.add_key_length(head)
w.add_value_length(head)
w.add_vocab_size(vocab)
w.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
if arch == "llama":
    w.add_rope_dimension_count(head)

# A character for each byte, as byte-level BPE writes them.
plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
letter = {b: chr(b) for b in plain}
letter.update((b, chr(256 + i)) for i, b in enumerate(b for b in range(256) if b not in letter))
special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
texts, merges = [letter[b] for b in range(256)], []
known, usual = set(texts), sorted(letter.values(), key=lambda x: (x != letter[32], not (x.isascii() and x.isalnum()), x))
at = 0
while len(texts) < vocab - len(special):
    first, seconds = (usual[at], usual) if at < 256 else (texts[at], usual[:27])
    for second in seconds:
        if len(texts) < vocab - len(special) and first + second not in known:
            known.add(first + second)
            texts.append(first + second)
            merges.append(f"{first} {second}")
    at += 1
w.add_tokenizer_model("gpt2")
w.add_tokenizer_pre("qwen2" if arch == "qwen3" else "gpt-2")
w.add_token_list(texts + special)
w.add_token_types([gguf.TokenType.NORMAL] * len(texts) + [gguf.TokenType.CONTROL] * len(special))
w.add_token_merges(merges)
w.add_bos_token_id(vocab - 3)
w.add_eos_token_id(vocab - 3)
w.add_add_bos_token(False)

draws, narrow = np.random.default_rng(0), gguf.GGMLQuantizationType.BF16


def matrix(name, rows, columns):
    numbers = draws.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.02)
    w.add_tensor(f"{name}.weight", gguf.quants.quantize(numbers, narrow), raw_dtype=narrow)


def ones(name, size):
    w.add_tensor(f"{name}.weight", np.ones(size, np.float32))


matrix("token_embd", vocab, hidden)
if not c["tie_word_embeddings"]:
    matrix("output", vocab, hidden)
ones("output_norm", hidden)
for i in range(layers):
    ones(f"blk.{i}.attn_norm", hidden)
    ones(f"blk.{i}.ffn_norm", hidden)
    if arch == "qwen3":
        ones(f"blk.{i}.attn_q_norm", head)
        ones(f"blk.{i}.attn_k_norm", head)
    matrix(f"blk.{i}.attn_q", heads * head, hidden)
    matrix(f"blk.{i}.attn_k", groups * head, hidden)
    matrix(f"blk.{i}.attn_v", groups * head, hidden)
    matrix(f"blk.{i}.attn_output", hidden, heads * head)
    matrix(f"blk.{i}.ffn_gate", inner, hidden)
    matrix(f"blk.{i}.ffn_up", inner, hidden)
    matrix(f"blk.{i}.ffn_down", hidden, inner)
w.write_header_to_file()
w.write_kv_data_to_file()
w.write_tensors_to_file()
w.close()
