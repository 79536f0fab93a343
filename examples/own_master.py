"""How do I decide myself what replicas exchange?

This training master is gossip averaging with one random peer.

Run:  python examples/own_master.py
"""

import random
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits

import daskdl


# --8<-- [start:master]
@dataclass(frozen=True)
class Gossip(daskdl.TrainingMaster):
    """Every few steps, each replica averages its model with one random peer."""

    every: int = 4
    replicas_per_worker: int = 1

    def attach(self, context):
        return GossipExchange(context, self.every)


class GossipExchange(daskdl.Exchange):
    """Publish the parameters of this replica, and fetch those of its peers."""

    def __init__(self, context, every):
        super().__init__(context)
        self.channel = context.channel
        self.every, self.steps = every, 0
        self.random = random.Random(context.replica)
        self.publish()

    def tensors(self):
        """Return parameters, and buffers such as the running means of batch norm."""
        module = self.context.module
        named = [*module.named_parameters(), *module.named_buffers()]
        return {name: tensor.detach() for name, tensor in named}

    def arrays(self):
        return {name: t.cpu().numpy().copy() for name, t in self.tensors().items()}

    def load(self, arrays):
        for name, tensor in self.tensors().items():
            tensor.copy_(torch.as_tensor(arrays[name]))

    def publish(self):
        self.channel.drop_blobs()
        self.channel.publish_blob("model", self.arrays())

    def after_step(self, interval, examples):
        self.steps += 1
        peers = self.channel.peers()
        if self.steps % self.every or not peers:
            return
        theirs = self.channel.fetch_blob(self.random.choice(peers), "model")
        if theirs is not None:  # else that peer has just left
            mine = self.arrays()
            self.load({name: (mine[name] + theirs[name]) / 2 for name in mine})
        self.publish()
        self.channel.progress(self.steps)

    def sync(self, interval, examples, *, ended):
        if not ended:
            return
        note = {**self.arrays(), "examples": examples}
        notes = self.channel.barrier(f"gossip {interval}", note).payloads
        total = sum(note["examples"] for note in notes.values())
        replicas = sorted(notes)  # the same order, so the same rounding, everywhere
        mean = {
            name: sum(notes[r][name] * (notes[r]["examples"] / total) for r in replicas)
            for name in self.tensors()
        }
        self.load(mean)
        self.publish()


# --8<-- [end:master]
def main():
    X, y = load_digits(return_X_y=True)
    X = (X / 16).astype("float32")
    trainer = daskdl.Trainer(
        model=lambda: torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        ),
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        master=Gossip(replicas_per_worker=4),
        client=False,  # replicas are threads of this process; or a Client
    )
    history = trainer.fit(X[:1400], y[:1400], epochs=10)
    score = trainer.evaluate(X[1400:], y[1400:])

    print(f"{history[-1]['replicas']} replicas, loss {history[-1]['loss']:.4f}")
    print(f"test accuracy {score['accuracy']:.4f}")


if __name__ == "__main__":
    main()
