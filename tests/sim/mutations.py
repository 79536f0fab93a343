"""Faults that were mended in the past, and central lines left out: can they be found?

Each is a change of the source of one module, made when it is imported. Run one with
``python -m tests.sim --mutation NAME``, all with ``python -m tests.sim --mutations``.
"""

import importlib.abc
import importlib.machinery
import sys
from typing import NamedTuple


class Mutation(NamedTuple):
    """A change of a module.

    Attributes:
        module: Its name.
        old: Text that occurs once.
        new: What is there instead.
    """

    module: str
    old: str
    new: str


MUTATIONS = {
    # ---- updates
    "an update is taken twice": Mutation(
        "daskdl.channel.inbox",
        "        if sequence <= complete or sequence in beyond:\n"
        "            return False\n        beyond.add",
        "        beyond.add",
    ),
    "progress overtakes updates": Mutation(
        "daskdl.channel.routing",
        "        if len(messages) != len(self.outbox):\n"
        "            progress = PeerProgress()\n",
        "",
    ),
    "a barrier does not wait until all updates are passed on": Mutation(
        "daskdl.channel.remote",
        "if kind == BarrierKind.AGREE and self._routing.relayed:",
        "if False:",
    ),
    "what was held between two barriers is dropped": Mutation(
        "daskdl.channel.run_state",
        "            for message in self._held:\n                self._send",
        "            for message in []:\n                self._send",
    ),
    "nothing is held between two barriers": Mutation(
        "daskdl.channel.run_state",
        "self.holding = kind == BarrierKind.AGREE",
        "self.holding = False",
    ),
    "a full relay forgets what it did not accept": Mutation(
        "daskdl.channel.transport",
        "self._outbox.drop(accepted)",
        "self._outbox.drop(len(batch))",
    ),
    "no missing update is requested": Mutation(
        "daskdl.channel.recovery",
        "if now - since >= self._missing_after_s.get(origin, MISSING_AFTER_S):",
        "if False:",
    ),
    "replicas compare before a relay has passed all updates on": Mutation(
        "daskdl.channel.remote",
        "ready = lambda: inbox.passed_on >= number",
        "ready = lambda: True or number",
    ),
    "replicas of a relay do not compare": Mutation(
        "daskdl.channel.remote",
        "            if all(received == survivors[0] for received in survivors):\n"
        "                return\n",
        "            if self._routing.relayed or survivors:\n                return\n",
    ),
    "an unreadable update counts as delivered": Mutation(
        "daskdl.channel.inbox",
        "            self.unreadable.setdefault(origin, {})[sequence] = message.step\n",
        "",
    ),
    "an update without a readable copy is waited for": Mutation(
        "daskdl.channel.recovery",
        "if all_answered and (skipped := self._inbox.skip_unreadable(origin)):",
        "if not all_answered and (skipped := []):",
    ),
    "a newcomer waits for an update that its snapshot lacks": Mutation(
        "daskdl.channel.inbox",
        "            self.unreadable = {o: dict.fromkeys(gaps, 0) "
        "for o, gaps in lacking.items()}\n",
        "            self.unreadable = {} if lacking else {}\n",
    ),
    "updates are forgotten before all have them": Mutation(
        "daskdl.channel.routing",
        "RetransmitBuffer(spec.outbox_bytes, evicts=self.relayed)",
        "RetransmitBuffer(0)",
    ),
    "a full inbox loses what it folds": Mutation(
        "daskdl.channel.inbox",
        "                fold_(self._folded[bucket], queued.update, self.grid)",
        "                pass",
    ),
    "a joining replica's inbox grows with the steps of the others": Mutation(
        "daskdl.channel.inbox",
        "        if self._in_step and (\n            len",
        "        if False and (\n            len",
    ),
    "updates are not applied after replicas agree": Mutation(
        "daskdl.training.gradient_sharing",
        "        self._channel.agree(key, published, gathered.gone, self._load)\n"
        "        self._apply(self._channel.drain())\n",
        "        self._channel.agree(key, published, gathered.gone, self._load)\n",
    ),
    "updates are delivered while replicas compare theirs": Mutation(
        "daskdl.channel.inbox",
        "return not self.holding or contains(target, sequence)",
        "return True",
    ),
    "in a mesh a leaving replica's last update waits for the others": Mutation(
        "daskdl.channel.routing",
        "[self.to_scheduler] if force else self.destinations()",
        "self.destinations()",
    ),
    # ---- sums of updates
    "a replica adds its own update again": Mutation(
        "daskdl.channel.inbox",
        "if origin == self.replica or self.received.has(origin, sequence):",
        "if self.received.has(origin, sequence):",
    ),
    "what was received before is not subtracted from a sum": Mutation(
        "daskdl.channel.inbox",
        "        steps = -count_of(original.threshold, grid)",
        "        steps = 0",
    ),
    "new updates of a sum that cannot be used are not requested": Mutation(
        "daskdl.channel.worker",
        "            self.inbox.add_unreadable(Message.update(stamp, step, 0))",
        "            self.inbox.received.accept(origin, sequence)",
    ),
    "what waits in a relay is dropped": Mutation(
        "daskdl.channel.run_state",
        "            self.waiting = self.waiting[len(sent) :]",
        "            self.waiting = []",
    ),
    "news overtake what waits in a relay": Mutation(
        "daskdl.channel.run_state",
        "            self.waiting.append(message)",
        "            self.waiting.insert(0, message)",
    ),
    "what a replica waits for waits in a relay": Mutation(
        "daskdl.channel.run_state",
        "            or self._ends_a_wait()",
        "",
    ),
    "a sum that a worker does not pass on is not fetched elsewhere": Mutation(
        "daskdl.channel.worker",
        "places.append((None, self._spec.replica, longest_s))",
        "places = places or [(None, self._spec.replica, longest_s)]",
    ),
    "a relay does not keep the sums that workers pass on": Mutation(
        "daskdl.channel.run_state",
        "message.kind == MessageKind.SUM_AT and message.sequence == number:",
        "message.kind == MessageKind.SUM_AT and message.sequence > number:",
    ),
    "a worker counts an earlier sum as the one that it fetches": Mutation(
        "daskdl.channel.worker",
        "        return self._frames.get(number)",
        "        return self._frames.get(number, self._frames.get(number - 1))",
    ),
    # ---- replicas that are lost
    "survivors keep different updates of a lost replica": Mutation(
        "daskdl.channel.remote",
        "            if all(received == survivors[0] for received in survivors):\n"
        "                return\n",
        "            return\n",
    ),
    "a lost replica comes back in the progress of others": Mutation(
        "daskdl.channel.inbox",
        "        if origin in self.failed:\n            return False\n",
        "",
    ),
    "leases of a lost replica stay taken": Mutation(
        "daskdl.channel.leasing",
        "        self._lost_leases.extend(held[number] for number in sorted(held))",
        "        pass",
    ),
    "a lost replica's own part is forgotten": Mutation(
        "daskdl.channel.leasing",
        "                self._left_over.append(parts.pop(replica))",
        "                parts.pop(replica)",
    ),
    "a lease that is given out again is not counted": Mutation(
        "daskdl.channel.leasing",
        "        self.repeated += 1\n",
        "",
    ),
    "a lease is finished twice": Mutation(
        "daskdl.channel.leasing",
        "self._held.get(replica, {}).pop(number, None)",
        "self._held.get(replica, {}).get(number, None)",
    ),
    "an interval that is over begins again": Mutation(
        "daskdl.channel.leasing",
        "self._interval_over = self._interval_over or (",
        "self._interval_over = False\n        return (",
    ),
    "an epoch that was ended goes on": Mutation(
        "daskdl.channel.leasing",
        "and not self._interval_over and not self._ended",
        "and not self._interval_over",
    ),
    "an epoch that was ended waits for rows that nobody holds": Mutation(
        "daskdl.channel.leasing",
        "        self.unfinished = sum(map(self.rows_held, self._held))",
        "        pass",
    ),
    "an epoch that was ended waits for the leases of a lost replica": Mutation(
        "daskdl.channel.leasing",
        "            self.unfinished -= sum(lease.rows for lease in held.values())\n",
        "",
    ),
    "barriers wait for a lost replica": Mutation(
        "daskdl.channel.run_state",
        "        self._release_all()\n        self._complete_barriers()\n",
        "        self._release_all()\n",
    ),
    "scores of a lost replica are lost though its leases are finished": Mutation(
        "daskdl.training.data_feed",
        "        if work is not None:\n            finished",
        "        if True:\n            finished",
    ),
    "what a lost replica has trained and scored does not count": Mutation(
        "daskdl.channel.run_state",
        '"departed": self._work_of_departed(barrier.payloads),',
        '"departed": [],',
    ),
    "a stop is lost with its replica": Mutation(
        "daskdl.channel.run_state",
        "            leases.lose(replica)\n",
        "            leases.lose(replica)\n"
        '        self._work.get(replica, {}).get("train", {}).pop("stop", None)\n',
    ),
    "rows of an unfinished lease count as trained": Mutation(
        "daskdl.training.data_feed",
        "            work = replace(self._work, logs=logs, stop=stop).to_wire()",
        "            work = replace(self.totals).to_wire()",
    ),
    "a silent replica is never removed": Mutation(
        "daskdl.channel.run_state",
        "return [r for r in self.present if self.replicas[r].heartbeat_at < before]",
        "return []",
    ),
    "a run that has ended fails for lack of replicas": Mutation(
        "daskdl.channel.run_state",
        "        if self.has_enough or self._ended:",
        "        if self.has_enough:",
    ),
    "a joining replica counts on steps before their updates": Mutation(
        "daskdl.channel.remote",
        "        self._inbox.in_order = False\n",
        "",
    ),
    "a result that is lost with its worker is waited for": Mutation(
        "daskdl.channel.scheduler",
        "                if member.worker == worker:",
        "                if member.worker == worker and not member.gone:",
    ),
    # ---- replicas that join
    "a snapshot may lack updates": Mutation(
        "daskdl.channel.remote",
        "                and self._inbox.received.reached(\n"
        "                    {o: s for o, s in request.cut.items() "
        "if o not in ignored}\n                )\n",
        "",
    ),
    "in a mesh not all send to a newcomer": Mutation(
        "daskdl.channel.run_state",
        "        return self.spec.relayed or all(\n"
        "            replicas[r].generation >= generation "
        "for r in self.members.training\n        )",
        "        return bool(replicas)",
    ),
    "a newcomer drops what came before its snapshot": Mutation(
        "daskdl.channel.worker",
        "                        await self._put(list(group))\n"
        "                        continue\n",
        "                        continue\n",
    ),
    "a newcomer that comes early does not wait for the others": Mutation(
        "daskdl.channel.scheduler",
        "            await self.until(lambda: members.started)\n"
        "        if not members.is_here",
        "            pass\n        if not members.is_here",
    ),
    "a newcomer waits for a replica that was lost before": Mutation(
        "daskdl.channel.remote",
        '            for replica in answer["gone"]:',
        "            for replica in []:",
    ),
    "a newcomer waits for a replica without work": Mutation(
        "daskdl.channel.scheduler",
        "reached = [[r, *members.replicas[r].progress]",
        "reached = [[r, *members.replicas[r].progress[:2]]",
    ),
    "a newcomer is activated in the middle of a barrier": Mutation(
        "daskdl.channel.scheduler",
        "        await self.until(lambda: not state.holding)\n",
        "",
    ),
    "a newcomer that is lost at the end fails the run": Mutation(
        "daskdl.channel.run_state",
        "        if self.members.expected or self._ended:\n            return\n",
        "        if self.members.expected:\n            return\n",
    ),
    # ---- waits and bounds
    "a wait for a full relay ends as a hanging replica is removed": Mutation(
        "daskdl.channel.remote",
        'bound = self._timeouts.bound("silence", "request")',
        'bound = self._timeouts.bound("silence")',
    ),
    "a wait for a busy relay ends": Mutation(
        "daskdl.channel.remote",
        "return ready() or counts() != before",
        "return ready()",
    ),
    "a full outbox accepts updates": Mutation(
        "daskdl.channel.routing",
        "            if not (force or self.has_room(message.nbytes + MESSAGE_BYTES)):\n"
        "                return False\n",
        "",
    ),
    "a replica that is stopped goes on waiting": Mutation(
        "daskdl.channel.inbox",
        "            return (self.stopped is not None and not even_if_stopped) "
        "or ready()",
        "            return ready()",
    ),
    "the run of a client that has gone goes on": Mutation(
        "daskdl.channel.scheduler",
        "            if live.client == client:",
        "            if False:",
    ),
}


def find(mutation, path=None):
    """The file of the module."""
    package, _, _ = mutation.module.rpartition(".")
    path = path or sys.modules[package].__path__
    return importlib.machinery.PathFinder.find_spec(mutation.module, path)


def changed(source, mutation):
    """The source of the module, changed in one place."""
    text = source.decode()
    if (count := text.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.module} has {count} times {mutation.old!r}")
    return text.replace(mutation.old, mutation.new)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name, path, mutation):
        super().__init__(name, path)
        self._mutation = mutation

    def get_code(self, fullname):
        source = changed(self.get_data(self.path), self._mutation)
        return compile(source, self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutation):
        self._mutation = mutation

    def find_spec(self, fullname, path, target=None):
        if fullname != self._mutation.module:
            return None
        spec = find(self._mutation, path)
        spec.loader = _Loader(fullname, spec.origin, self._mutation)
        return spec


def apply(name):
    """Change the module when it is imported, which it must not be yet."""
    mutation = MUTATIONS[name]
    if mutation.module in sys.modules:
        raise RuntimeError(f"{mutation.module} is imported already")
    sys.meta_path.insert(0, _Finder(mutation))
