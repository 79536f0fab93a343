"""Plain PyTorch: one process, or several that know nothing of each other."""

from benchmarks.peers.arguments import parser, read
from benchmarks.peers.loop import meet, plain_step, report, train


def main() -> None:
    own, _ = read(parser(__doc__))
    model = own.model()
    step = plain_step(own, model, own.rule()(model.parameters()))
    meeting = meet(own)
    train(own, meeting, model, step, block=None)
    report(own, meeting)


if __name__ == "__main__":
    main()
