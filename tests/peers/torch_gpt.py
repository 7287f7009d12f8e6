"""PyTorch by hand, and the loggers that people put into its loops, on the problem that `workbench bench suite` gives.

python torch_gpt.py serve PROBLEM           # answers requests; see serve.py
python torch_gpt.py look PROBLEM CHECKPOINT # a cold look at the step after a checkpoint: a table of layers
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from gpt import Training, read_problem
from safetensors.torch import load_file, save_file
from serve import seconds, serve, turns


def norms_in_one_go(training, out, more=True):
    """Norms of every gradient, weight, m and v by `_foreach_norm`, and of each module's output by hooks: one line."""
    activations = []
    for module in training.model.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda module, inputs, output: activations.append(output.detach().norm()))
    parameters = list(training.model.parameters())

    def step():
        activations.clear()
        loss = training.backward()
        gradients = torch._foreach_norm([p.grad for p in parameters])
        training.update()
        norms = [*gradients, *activations]
        if more:
            moments = [training.optimizer.state[p] for p in parameters]
            norms += torch._foreach_norm([p.detach() for p in parameters])
            for name in ("exp_avg", "exp_avg_sq"):
                norms += torch._foreach_norm([one[name] for one in moments])
        values = torch.stack([loss.detach(), *norms]).tolist()
        out.write(json.dumps({"step": training.number, "loss": values[0], "norms": values[1:]}) + "\n")

    return step


def hooks(training, out):
    """What is written first: a hook a parameter and a module, each norm fetched by itself."""
    noted = {}
    for name, parameter in training.model.named_parameters():
        parameter.register_hook(lambda g, name=name: noted.update({name: g.norm().item()}))
    for name, module in training.model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(lambda m, i, o, name=name: noted.update({f"{name}/out": o.norm().item()}))

    def step():
        loss = training.step()
        out.write(json.dumps({"step": training.number, "loss": loss, **noted}) + "\n")

    return step


def deterministic(training):
    def step():
        torch.use_deterministic_algorithms(True)
        training.step()
        torch.use_deterministic_algorithms(False)

    return step


def tensorboard(training, folder):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))

    def step():
        training.step()
        for name, parameter in training.model.named_parameters():
            writer.add_histogram(name, parameter, training.number)
            writer.add_histogram(f"{name}/gradient", parameter.grad, training.number)

    return step


def wandb_watch(training, folder):
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(mode="offline", dir=str(folder), settings=wandb.Settings(silent=True, console="off"))
    run.watch(training.model, log="all", log_freq=1)

    def step():
        run.log({"loss": training.step()})

    return step


def trainscope(training, folder):
    from trainscope import TrainScope
    from trainscope.core.config import TrainScopeConfig

    scope = TrainScope(training.model, training.optimizer, config=TrainScopeConfig(run_dir=str(folder))).attach()

    def step():
        loss = training.backward()
        scope.step(loss.item(), batch_index=training.number)
        training.update()

    return step


class Peer:
    def __init__(self, problem):
        self.problem, self.scratch = problem, Path(problem["scratch"])
        self.plain = Training(problem)
        self.variants, self.failed = {}, {}

    def first_loss(self):
        """Of the initial weights on the first batch: is it the same model?"""
        with torch.no_grad():
            return {"loss": Training(self.problem).loss().item()}

    def prepare(self, names):
        """Makes variants, and performs a step of each."""
        out = open(self.scratch / "lines.jsonl", "w")
        makers = {
            "plain": lambda: self.plain.step,
            "control": lambda: self.plain.step,
            "batched hooks": lambda: norms_in_one_go(Training(self.problem), out),
            "a hook each": lambda: hooks(Training(self.problem), out),
            "deterministic algorithms": lambda: deterministic(Training(self.problem)),
            "TensorBoard histograms": lambda: tensorboard(Training(self.problem), self.scratch / "tensorboard"),
            "trainscope": lambda: trainscope(Training(self.problem), self.scratch / "trainscope"),
            "wandb.watch": lambda: wandb_watch(Training(self.problem), self.scratch / "wandb"),
        }
        for name in names:
            try:
                step = makers[name]()
                step()
                self.variants[name] = step
            except Exception as error:  # one that fails on this model is said, and the others are measured
                self.failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return {"variants": list(self.variants), "failed": self.failed}

    def steps(self, rounds, burst, first=0):
        return {"times": turns(self.variants, rounds, burst, first)}

    def _tensors(self):
        """Weights, m and v by name, as a checkpoint in safetensors needs them."""
        found = {}
        for name, parameter in self.plain.model.named_parameters():
            found[name] = parameter.detach()
            for moment in ("exp_avg", "exp_avg_sq"):
                found[f"{name}/{moment}"] = self.plain.optimizer.state[parameter][moment]
        return found

    def _durable(self, path, save):
        def perform():
            save(str(path))
            with open(path, "rb+") as file:
                os.fsync(file.fileno())

        taken = seconds(perform)
        path.unlink()
        return taken

    def save(self):
        """Seconds until a checkpoint is durable, by way; and for which the loop is blocked by an asynchronous one."""
        model, optimizer = self.plain.model, self.plain.optimizer
        whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        durable = {
            "torch.save": self._durable(self.scratch / "torch.pt", lambda path: torch.save(whole, path)),
            "safetensors": self._durable(self.scratch / "s.safetensors", lambda path: save_file(self._tensors(), path)),
        }
        blocked, waiting = self._asynchronously(whole)
        return {"durable": durable, "blocked": blocked, "until done": waiting, "plain": seconds(self.plain.step)}

    def _asynchronously(self, whole):
        import shutil

        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        if not dist.is_initialized():
            store = dist.FileStore(str(self.scratch / "store"), 1)
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        folder = self.scratch / "dcp"
        shutil.rmtree(folder, ignore_errors=True)
        began = time.perf_counter()
        future = dcp.async_save(whole, checkpoint_id=str(folder))
        blocked = time.perf_counter() - began
        future.result()
        return blocked, time.perf_counter() - began

    def load(self):
        """Seconds to put a checkpoint into the live model and optimizer, by way."""
        model, optimizer = self.plain.model, self.plain.optimizer
        pickled, tensors = self.scratch / "load.pt", self.scratch / "load.safetensors"
        if not pickled.exists():
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, pickled)
            save_file(self._tensors(), str(tensors))

        def from_pickle():
            found = torch.load(pickled)
            model.load_state_dict(found["model"])
            optimizer.load_state_dict(found["optimizer"])

        def from_tensors():
            found = load_file(str(tensors))
            with torch.no_grad():
                for name, tensor in self._tensors().items():
                    tensor.copy_(found[name])

        return {"torch.load": seconds(from_pickle), "safetensors": seconds(from_tensors)}

    def checkpoint(self, path):
        """Writes what `look` starts from."""
        training = self.plain
        torch.save({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}, path)
        return {}

    def look(self, path):
        """The same look in a live process: load, perform a hooked step, format its table."""
        return {"seconds": seconds(lambda: looked(self.plain, path)), "plain": seconds(self.plain.step)}


def looked(training, path):
    """The table of layers of the step after a checkpoint."""
    found = torch.load(path)
    training.model.load_state_dict(found["model"])
    training.optimizer.load_state_dict(found["optimizer"])
    activations, handles = {}, []
    for name, module in training.model.named_modules():
        if not list(module.children()):
            noted = lambda module, inputs, output, name=name: activations.update({name: output.detach().norm()})  # noqa: E731
            handles.append(module.register_forward_hook(noted))
    training.step()
    for handle in handles:
        handle.remove()
    rows = [f"{name:40} {value.item():.6g}" for name, value in activations.items()]
    for name, parameter in training.model.named_parameters():
        moments = training.optimizer.state[parameter]
        values = [parameter.grad, parameter.detach(), moments["exp_avg"], moments["exp_avg_sq"]]
        rows.append(f"{name:40} " + " ".join(f"{norm.item():.6g}" for norm in torch._foreach_norm(values)))
    return "\n".join(rows)


def main():
    mode, problem = sys.argv[1], read_problem(sys.argv[2])
    if mode == "look":
        print(looked(Training(problem), sys.argv[3]))
        return
    peer = Peer(problem)
    names = ("first_loss", "prepare", "steps", "save", "load", "checkpoint", "look")
    serve({name: getattr(peer, name) for name in names})


if __name__ == "__main__":
    main()
