"""How do I fine-tune a model of transformers?

Nothing is downloaded: a small BERT first learns to fill in words of sentences without
labels, and is saved. A model from the hub would be loaded in the same way,
``from_pretrained("bert-base-uncased", num_labels=2)``. It is then fine-tuned to tell
good reviews from bad ones.

Run:  python examples/transformers_finetune.py
"""

import random
import tempfile

import torch
from dask.distributed import Client
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
)

import daskdl

SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
THINGS = ["film", "plot", "cast", "music", "script", "scene", "hero", "ending"]
WORDS = {
    1: ["great", "clever", "moving", "funny", "warm", "lovely", "fresh", "wise"],
    0: ["dull", "clumsy", "boring", "silly", "cold", "ugly", "stale", "empty"],
}
LINKS = ["the", "was", "and", "with", "a"]


def reviews(count, seed):
    """Return sentences, and 1 for each good one."""
    rng = random.Random(seed)
    labels = [rng.randrange(2) for _ in range(count)]
    texts = []
    for label in labels:
        first, second = rng.sample(WORDS[label], 2)
        about = f"the {rng.choice(THINGS)} was {first} and {second}"
        texts.append(about + rng.choice(["", f" with a {rng.choice(THINGS)}"]))
    return texts, torch.tensor(labels)


def made_tokenizer():
    words = [*SPECIAL, *LINKS, *THINGS, *WORDS[0], *WORDS[1]]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = ["pad_token", "cls_token", "sep_token", "mask_token", "unk_token"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **dict(zip(names, SPECIAL, strict=True))
    )


def adamw(params):
    return torch.optim.AdamW(params, lr=2e-3)


def main():
    tokenizer = made_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=2,
    )
    with (
        Client(n_workers=2, threads_per_worker=1) as client,
        tempfile.TemporaryDirectory() as folder,
    ):
        # Sentences without labels: the collator hides words, anew in each epoch, and
        # makes them the labels. Input and output embeddings are tied.
        texts, _ = reviews(2000, seed=0)
        items = [{"input_ids": ids} for ids in tokenizer(texts)["input_ids"]]
        trainer = daskdl.Trainer(
            BertForMaskedLM(config), optimizer=adamw, client=client
        )
        hide_words = DataCollatorForLanguageModeling(tokenizer)
        sentences = daskdl.data.dataset(items, collate_fn=hide_words)
        history = trainer.fit(sentences, epochs=5)
        first, *_, last = history.column("loss")
        print(f"hidden words: loss {first:.2f}, then {last:.2f}")
        trainer.model_.save_pretrained(folder)

        model = BertForSequenceClassification.from_pretrained(folder, num_labels=2)
        model.activation_checkpointing_enable()  # saves memory, and costs time
        texts, labels = reviews(200, seed=1)
        tokens = tokenizer(texts, padding=True, return_tensors="pt")
        trainer = daskdl.Trainer(model, optimizer=adamw, client=client)
        for row in trainer.fit(tokens, labels, epochs=6, batch_size=16):
            print(f"epoch {row['epoch']}  loss {row['loss']:.4f}")

        texts, labels = reviews(500, seed=2)
        tokens = tokenizer(texts, padding=True, return_tensors="pt")
        print(f"test accuracy {trainer.evaluate(tokens, labels)['accuracy']:.4f}")
        logits = trainer.predict(tokens, output="logits")
        good = logits.argmax(dim=1) == 1
        example = next(
            text for text, is_good in zip(texts, good, strict=True) if is_good
        )
        print(f"{int(good.sum())} of {len(texts)} are good, such as: {example}")


if __name__ == "__main__":
    main()
