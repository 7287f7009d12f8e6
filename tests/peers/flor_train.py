"""The script that FlorDB records and replays: some epochs of the GPT, the loss logged each step."""

import flordb as flor
import torch
from gpt import Training, read_problem

flor.arg("size", "as the problem says")  # a replay of a run without any argument fails (4.0.1)
training = Training(read_problem("problem.json"))
for _epoch in flor.loop("epoch", range(3)):
    for _step in flor.loop("step", range(5)):
        loss = training.backward()
        flor.log("loss", loss.item())
        # hindsight
        training.update()
torch.save({"model": training.model.state_dict()}, "model.pt")
