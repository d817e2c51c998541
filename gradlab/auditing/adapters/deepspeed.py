"""DeepSpeed's engine on a CPU, with gradient_accumulation_steps: backward and step for each
micro-batch."""

import os
import tempfile

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed

from gradlab.auditing.adapters import torch_models as small
from gradlab.auditing.models import Weights
from gradlab.auditing.problem import Problem

supports = ("tokens", "clip_norm", "schedule", "momentum", "adam", "adamw")


def settings(problem: Problem) -> dict:
    """The engine's configuration; this process becomes its only one."""
    if not deepspeed.comm.is_initialized():
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        meeting = f"file://{tempfile.mkdtemp()}/meeting"
        alone = {"auto_mpi_discovery": False, "rank": 0, "world_size": 1}
        deepspeed.init_distributed("gloo", init_method=meeting, verbose=False, **alone)
    found: dict = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": problem.k}
    return found | {"gradient_clipping": problem.clip_norm or 0.0}


def train(problem: Problem, zero_stage: int = 0) -> list[Weights]:
    """The weights after each update, with ZeRO of a stage or without it (0)."""
    zero = {"zero_allow_untested_optimizer": True, "zero_optimization": {"stage": zero_stage}}
    config = settings(problem) | zero
    model = small.Small(problem)
    history = list[Weights]()
    optimizer = small.optimizer(problem, model)
    schedule = small.schedule(problem, optimizer)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
    )
    for epoch in problem.epochs:
        for microbatch in epoch:
            engine.backward(engine(*small.tensors(microbatch)))
            engine.step()
            if engine.global_steps > len(history):
                history.append(model.read())
    return history
