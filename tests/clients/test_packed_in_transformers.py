"""Packed rows in Hugging Face's Trainer: the labels are right, and documents stay apart."""

import numpy as np
import pytest
import torch

from npydata import PackedDataset

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

VOCABULARY, SEQ_LEN = 64, 64


def llama(attention):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=SEQ_LEN,
            attn_implementation=attention,
        )
    )


@pytest.fixture
def packed(tmp_path):
    """Rows of documents in which x is followed by 5x + 1, each of a length of its own."""
    rng = np.random.default_rng(0)
    documents, ends = [], []
    for length in rng.integers(5, 40, 2000).tolist():
        document = [int(rng.integers(VOCABULARY))]
        while len(document) < length:
            document.append((5 * document[-1] + 1) % VOCABULARY)
        documents += document
        ends.append(len(documents))
    np.array(documents, "<u2").tofile(tmp_path / "a.ds")
    np.array(ends, "<u8").tofile(tmp_path / "a.ds.index")
    return PackedDataset(tmp_path / "a.ds", SEQ_LEN, as_dict=("input_ids", "labels"))


def test_a_tiny_llama_learns_the_next_token_and_not_the_one_after(packed, tmp_path):
    model = llama("sdpa")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=120,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    transformers.Trainer(model=model, args=arguments, train_dataset=packed).train()
    x = torch.arange(15)
    with torch.no_grad():
        found = model(input_ids=x[:, None]).logits[:, -1].argmax(-1)
    assert (found == (5 * x + 1) % VOCABULARY).sum() >= 14


def leaks(attention, **options):
    """Whether the second document's logits change with the first one's tokens."""
    model = llama(attention).eval()
    position_ids = torch.tensor([[*range(20), *range(12)]])
    inputs = torch.arange(32)[None]
    changed = inputs.clone()
    changed[0, :20] = 63 - changed[0, :20]
    with torch.no_grad():
        one, other = (
            model(input_ids=ids, position_ids=position_ids, **options).logits[0, 20:]
            for ids in (inputs, changed)
        )
    return not torch.allclose(one, other, atol=1e-5)


def block_mask():
    documents = torch.tensor([0] * 20 + [1] * 12)
    allowed = (documents[:, None] == documents).tril()
    return allowed, torch.zeros(32, 32).masked_fill(~allowed, float("-inf"))


ONES = torch.ones(1, 32, dtype=torch.int64)
ALLOWED, ADDED = (mask[None, None] for mask in block_mask())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("options", "leaking"), [
    ({}, ["sdpa", "eager"]),
    ({"use_cache": False}, []),
    ({"use_cache": False, "attention_mask": ONES}, ["sdpa", "eager"]),
    ({"attention_mask": ALLOWED}, ["eager"]),  # eager adds it to the scores, as 0 and 1
    ({"attention_mask": ADDED}, []),
])  # fmt: skip
def test_documents_are_kept_apart_as_the_page_says(attention, options, leaking):
    assert leaks(attention, **options) == (attention in leaking)
