"""Models of transformers, made from tiny configurations, without a network."""

import numpy as np
import pytest
import torch
from torch import nn

import daskdl
from tests.support.problems import kept, trainer

transformers = pytest.importorskip("transformers")

WORDS, LENGTH = 50, 12
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
rng = np.random.default_rng(0)
IDS = rng.integers(5, WORDS, (64, LENGTH))
MASK = (np.arange(LENGTH) < rng.integers(6, LENGTH + 1, (64, 1))).astype(np.int64)
LABELS = (IDS[:, 0] > WORDS // 2).astype(np.int64)
INPUTS = {"input_ids": IDS, "attention_mask": MASK}
SENTENCES = {**INPUTS, "labels": LABELS}
TEXT = {**INPUTS, "labels": np.where(MASK == 1, IDS, -100)}


def bert(**options):
    config = transformers.BertConfig(
        vocab_size=WORDS,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        num_labels=2,
        **{**SMALL, **options},
    )
    return transformers.BertForSequenceClassification(config)


def gpt2(**options):
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=LENGTH,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        vocab_size=WORDS, intermediate_size=64, tie_word_embeddings=True, **SMALL
    )
    return transformers.LlamaForCausalLM(config)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3)


def fitted(model, X, y=None, **options):
    options = {"loss": None, "optimizer": adamw, **options}
    fitted = trainer(False, model=model, **options)
    fitted.fit(X, y, epochs=2, batch_size=16)
    return fitted


TASKS = {"bert": (bert, SENTENCES), "gpt2": (gpt2, TEXT), "llama": (llama, TEXT)}


@pytest.mark.parametrize("task", TASKS)
def test_a_model_is_trained_on_its_own_loss(task):
    model, X = TASKS[task]
    trained = fitted(
        model,
        X,
        master=kept(replicas_per_worker=2),
        callbacks=[daskdl.LayerMonitor()],
        scheduler=lambda optimizer: transformers.get_linear_schedule_with_warmup(
            optimizer, 1, 8
        ),
        scheduler_every="step",
        clip_grad_norm=1.0,
    )

    first, last = trained.history_.column("loss")
    assert last < first
    assert trained.evaluate(X)["loss"] < first
    named = {name for name, _ in trained.model_.named_parameters()}
    assert named == set(trained.history_.layers.names)


def test_one_replica_does_what_a_plain_loop_does(one_thread):
    torch.manual_seed(0)
    plain = gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    fitted = trainer(False, model=plain, loss=None, optimizer=adamw)
    fitted.fit(TEXT, epochs=2, batch_size=16, shuffle=False)

    optimizer = adamw(plain.train().parameters())
    for start in [0, 16, 32, 48] * 2:
        optimizer.zero_grad()
        batch = {n: torch.from_numpy(x[start : start + 16]) for n, x in TEXT.items()}
        plain(**batch).loss.backward()
        optimizer.step()

    expected = plain.state_dict()
    assert fitted.model_.state_dict().keys() == expected.keys()
    for name, value in fitted.model_.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("model", [gpt2, llama])
def test_tied_embeddings_stay_tied_and_save_pretrained_writes_them(model, tmp_path):
    tuned = fitted(model, TEXT, master=kept(replicas_per_worker=2))
    trained = tuned.model_

    tied = trained.get_input_embeddings().weight
    assert trained.get_output_embeddings().weight is tied
    trained.save_pretrained(tmp_path / "hub")
    again = type(trained).from_pretrained(tmp_path / "hub")
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    logits = tuned.predict(INPUTS, output="logits")
    np.testing.assert_array_equal(
        daskdl.predict(again, INPUTS, output="logits", client=False), logits
    )
    tuned.save(tmp_path / "run")
    loaded = daskdl.Trainer.load(tmp_path / "run", model=model, client=False)
    assert loaded.evaluate(TEXT) == tuned.evaluate(TEXT)


@pytest.mark.parametrize("task", TASKS)
def test_activations_are_checkpointed_and_the_result_is_the_same(task):
    model, X = TASKS[task]

    def saving():
        checkpointing = model()
        # Renamed in a later release of transformers 5.
        enable = getattr(checkpointing, "activation_checkpointing_enable", None)
        (enable or checkpointing.gradient_checkpointing_enable)()
        return checkpointing

    plain = fitted(model, X)
    saved = fitted(saving, X)

    np.testing.assert_allclose(
        saved.history_.column("loss"), plain.history_.column("loss"), rtol=1e-5
    )
    assert any(
        getattr(saved.model_, name, False)
        for name in ("is_activation_checkpointing", "is_gradient_checkpointing")
    )


def test_encodings_are_data_and_outputs_are_chosen_by_name():
    encoding = transformers.BatchEncoding(INPUTS)
    trained = fitted(bert, encoding, LABELS, loss=nn.CrossEntropyLoss())

    assert trained.history_.column("loss")[1] < trained.history_.column("loss")[0]
    scores = trained.evaluate(encoding, LABELS, metrics="classification")
    logits = trained.predict(encoding, output="logits")
    assert scores["accuracy"] == np.mean(logits.argmax(axis=1) == LABELS)
    assert trained.predict(encoding).keys() == {"logits"}
    with trained.predictor(output="logits") as predictor:
        np.testing.assert_allclose(
            predictor({n: x[:8] for n, x in INPUTS.items()}), logits[:8], rtol=1e-4
        )
    losses = trained.score_examples(encoding, LABELS)
    np.testing.assert_allclose(losses.mean(), scores["loss"], rtol=1e-5)


def test_a_cache_among_the_outputs_is_told_how_to_leave_it_out():
    with pytest.raises(daskdl.ModelError, match="select one of several outputs"):
        daskdl.predict(gpt2(), INPUTS, client=False)


def test_a_misspelled_key_is_refused_although_forward_has_keywords():
    wrong = {"input_ids": IDS, "attention_masks": MASK}

    with pytest.raises(daskdl.ModelError, match="'attention_masks' is none of them"):
        daskdl.predict(bert(), wrong, client=False)


def test_a_collator_pads_items_of_several_lengths():
    class Sentences(torch.utils.data.Dataset):
        def __len__(self):
            return len(IDS)

        def __getitem__(self, i):
            length = MASK[i].sum()
            return {"input_ids": IDS[i, :length], "labels": LABELS[i]}

    def padded(items):
        ids = nn.utils.rnn.pad_sequence(
            [torch.from_numpy(item["input_ids"]) for item in items], batch_first=True
        )
        labels = torch.tensor([item["labels"] for item in items])
        return transformers.BatchEncoding(
            {"input_ids": ids, "attention_mask": ids > 0, "labels": labels}
        )

    fitted = trainer(False, model=bert, loss=None, optimizer=adamw)
    sentences = daskdl.data.dataset(Sentences(), collate_fn=padded)
    history = fitted.fit(sentences, epochs=3, batch_size=16)

    assert history.column("loss")[2] < history.column("loss")[0]
    assert fitted.evaluate(sentences)["accuracy"] > 0.5
