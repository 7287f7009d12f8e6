"""A small language model in mlx-lm's format, its tokenizer and its data, made on the spot: nothing is downloaded."""

import json

import mlx.core as mx
import numpy as np

WIDTH, LAYERS = 32, 2
WORDS = [f"w{number}" for number in range(180)]
SPECIAL = ["<|pad|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
DATED = "{{ 'w' ~ strftime_now('%-d') }} " + TEMPLATE  # a word of the vocabulary


def save_model(folder, *, family="qwen3", quantised=False, dtype="float32", template=TEMPLATE, seed=5):
    """Random weights in a real architecture, and a tokenizer of whole words."""
    from mlx_lm.utils import _get_classes, quantize_model, save_config, save_model

    folder.mkdir(parents=True)
    config = {
        "model_type": family,
        "hidden_size": 2 * WIDTH if quantised else WIDTH,  # a group of 4-bit weights takes 32 columns at least
        "num_hidden_layers": LAYERS,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": len(SPECIAL) + len(WORDS) + 20,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": SPECIAL.index("<|end|>"),
    }
    before = mx.array(mx.random.state[0])
    mx.random.seed(seed)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    model.set_dtype(getattr(mx, dtype))
    if quantised:
        model, config = quantize_model(model, config, group_size=32, bits=4)
    mx.eval(model.parameters())
    save_model(folder, model)
    save_config(config, folder / "config.json")
    _tokenizer(template).save_pretrained(str(folder))
    high, low = before.tolist()
    mx.random.seed((high << 32) | low)
    return folder


def _tokenizer(template):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS, "user", "assistant", "system"])}
    whole = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "unk_token": "<|unknown|>"}
    made = PreTrainedTokenizerFast(tokenizer_object=whole, **names)
    made.chat_template = template
    return made


def save_data(folder, kind="text", *, train=11, valid=5, test=0, longest=70, seed=9):
    """train.jsonl, valid.jsonl and test.jsonl of random words: "text", "chat" or "completions"."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(seed)

    def words():
        return " ".join(draw.choice(WORDS, int(draw.integers(3, longest))))

    def example(number):
        if kind == "text":
            return {"text": words()}
        if kind == "completions":
            return {"prompt": words(), "completion": words()}
        messages = [{"role": "user", "content": words()}, {"role": "assistant", "content": words()}]
        return {"messages": messages} | ({"tools": None} if number % 3 == 0 else {})  # which mlx-lm counts as longer

    for name, count in (("train", train), ("valid", valid), ("test", test)):
        if count:
            lines = [json.dumps(example(number)) for number in range(count)]
            (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def settings(model, data, **changed):
    """The entries of a configuration file for `mlx_lm.lora`."""
    return {
        "model": str(model),
        "data": str(data),
        "train": True,
        "num_layers": -1,
        "batch_size": 2,
        "iters": 12,
        "learning_rate": 1e-3,
        "max_seq_length": 64,
        "steps_per_eval": 4,
        "val_batches": 2,
        "save_every": 5,
        "lora_parameters": {"rank": 4, "dropout": 0.0, "scale": 10.0},
    } | changed
