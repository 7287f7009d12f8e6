"""Cockpit on the problem that `workbench bench suite` gives; and, as it can't follow a GPT, on a network that it can.

python cockpit_mlp.py serve PROBLEM    # answers requests; see serve.py
"""

import sys
import warnings

import torch
from backpack import extend
from cockpit import Cockpit
from cockpit.utils.configuration import configuration
from gpt import Training, read_problem
from serve import serve, turns
from torch import nn

warnings.simplefilter("ignore")
LEVEL = "economy"  # the least of its three configurations


def on_gpt(problem):
    """One tracked step of the GPT: raises what Cockpit raises."""
    training = Training(problem)
    model, measure = extend(training.model), extend(nn.CrossEntropyLoss())
    single = extend(nn.CrossEntropyLoss(reduction="none"))
    cockpit = Cockpit(training.model.parameters(), quantities=configuration(LEVEL))
    x, y = (torch.from_numpy(part) for part in training.batches[0])
    logits = model(x).flatten(0, 1)
    loss = measure(logits, y.flatten())
    info = {"batch_size": len(x), "individual_losses": single(logits, y.flatten()), "loss": loss}
    with cockpit(0, info=info | {"optimizer": training.optimizer}):
        loss.backward(create_graph=cockpit.create_graph(0))
    norms = cockpit.get_output()
    if not norms:
        raise RuntimeError("it measured nothing")


class Network:
    """784-512-512-10 with plain SGD on batches of 128: what BackPACK, on which Cockpit stands, was made for."""

    def __init__(self, tracked):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        self.model, self.measure = model, nn.CrossEntropyLoss()
        if tracked:
            self.model, self.measure = extend(self.model), extend(self.measure)
            self.single = extend(nn.CrossEntropyLoss(reduction="none"))
            self.cockpit = Cockpit(self.model.parameters(), quantities=configuration(LEVEL))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.x, self.y, self.number = torch.randn(128, 784), torch.randint(10, (128,)), 0

    def plain(self):
        self.optimizer.zero_grad()
        loss = self.measure(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        loss.item()

    def step(self):
        self.optimizer.zero_grad()
        outputs = self.model(self.x)
        loss, losses = self.measure(outputs, self.y), self.single(outputs, self.y)
        info = {"batch_size": len(self.x), "individual_losses": losses, "loss": loss, "optimizer": self.optimizer}
        with self.cockpit(self.number, info=info):
            loss.backward(create_graph=self.cockpit.create_graph(self.number))
        self.optimizer.step()
        loss.item()
        self.number += 1


def prepare(path, names):
    failed = {}
    try:
        on_gpt(read_problem(path))
    except Exception as error:  # what it says of a GPT is the answer
        said = str(error).strip().splitlines() or [""]
        failed["Cockpit"] = f"fails on this GPT ({type(error).__name__}: {said[0][:160]})"
    return {"variants": names, "failed": failed}


class Peer:
    def __init__(self, path):
        self.path = path

    def prepare(self, names):
        answer = prepare(self.path, names)
        plain, tracked = Network(False), Network(True)
        makers = {"plain": plain.plain, "control": plain.plain, "Cockpit, on an MLP": tracked.step}
        self.variants = {name: makers[name] for name in names}
        for step in self.variants.values():
            step()
        return answer

    def steps(self, rounds, burst, first=0):
        return {"times": turns(self.variants, rounds, burst, first)}


if __name__ == "__main__":
    peer = Peer(sys.argv[2])
    serve({name: getattr(peer, name) for name in ("prepare", "steps")})
