"""Mistakes with devices, each planted in a copy of the tree: a test on the strict device must fail.

Whoever adds code that touches a device adds the mistake that a tired colleague would make there.
`old` is the exact text and occurs once in its file.
"""

from __future__ import annotations

from dataclasses import dataclass

PARTS = "tests/device/inside/test_parts.py"
RUNS = "tests/device/inside/test_runs.py"
COMMANDS = "tests/device/inside/test_commands.py"
MEMORY = "tests/device/inside/test_memory.py"
PEAKS = "tests/device/inside/test_peaks.py"
POLICIES = "tests/gpu/test_policies.py"


@dataclass(frozen=True)
class Fault:
    """A planted mistake, and the test that must fail."""

    name: str
    """Area and a few words: the id of the test."""
    file: str
    old: str
    new: str
    why: str
    """What would go wrong on a GPU."""
    test: str
    """File of the tests that run."""
    only: str
    """Expression for `pytest -k`: the narrowest test."""


OFFLOAD, WEIGHTS = (
    "src/digenrl/models/offload.py",
    "src/digenrl/transport/weights.py",
)
PIPELINE, CODEC = "src/digenrl/models/pipeline_codec.py", "src/digenrl/models/codec.py"
ENGINE, DENOISE = "src/digenrl/rollout/engine.py", "src/digenrl/diffusion/denoise.py"
SCORER, CHILD = "src/digenrl/rewards/scorer.py", "src/digenrl/rewards/process.py"
PROTOCOL, DEVICES = "src/digenrl/rewards/protocol.py", "src/digenrl/devices.py"
GRADIENTS = "src/digenrl/strategy/gradients.py"
STRATEGY = "src/digenrl/strategy/disaggregated.py"

FAULTS = (
    # ---- streams
    Fault(
        "stream: a copy out does not wait for what it copies",
        OFFLOAD,
        "        side = _copy_stream(self._device)\n        side.wait_stream(torch.accelerator.current_stream(self._device))\n        host",
        "        side = _copy_stream(self._device)\n        host",
        "activations are copied before they are computed",
        PARTS,
        "off_loaded",
    ),
    Fault(
        "stream: the backward does not wait for what comes back",
        OFFLOAD,
        "torch.accelerator.current_stream(self._device).wait_event(self._copied)",
        "pass",
        "gradients are computed from what is not there yet",
        PARTS,
        "off_loaded",
    ),
    Fault(
        "stream: memory of a copy out is given again",
        OFFLOAD,
        "        source.record_stream(side)\n",
        "",
        "the next block writes over activations that are being copied",
        PARTS,
        "off_loaded",
    ),
    Fault(
        "stream: a copy back writes memory in use",
        OFFLOAD,
        "        side.wait_stream(\n            torch.accelerator.current_stream(self._device)\n        )  # the",
        "        # the",
        "fresh buffers lie where the default stream still reads",
        PARTS,
        "off_loaded",
    ),
    Fault(
        "stream: the copies have no event",
        OFFLOAD,
        "            self._copied.record(_copy_stream(self._device))",
        "            pass",
        "the backward waits for nothing",
        PARTS,
        "off_loaded",
    ),
    # ---- pinned buffers and publication
    Fault(
        "publication: nobody waits for the copy",
        WEIGHTS,
        "            view.copy_(_whole_parameter(parameters[name]).to(view.dtype))",
        "            view.copy_(_whole_parameter(parameters[name]).to(view.dtype), non_blocking=True)",
        "digests and messages are made of bytes that have not arrived",
        PARTS,
        "a_version",
    ),
    Fault(
        "pinned: a version lies in pageable memory",
        WEIGHTS,
        "pin = any(accelerator.is_own(parameters[name].device) for name in self.starts)",
        "pin = False",
        "copies of weights block and run at half speed",
        PARTS,
        "a_version",
    ),
    Fault(
        "pinned: an accelerator is taken for a processor",
        "src/digenrl/accelerator.py",
        'return device.type != "cpu" and device.type == device_kind()',
        'return device.type == "cuda"',
        "every other kind loses streams and pinned memory",
        PARTS,
        "a_version",
    ),
    Fault(
        "publication: the suite for GPUs gives no names (H8)",
        POLICIES,
        "    version = publish(1, sent, NOBODY",
        "    version = publish(1, tuple(sent.values()), NOBODY",
        "that suite fails on the first GPU",
        POLICIES,
        "adopted_bit_by_bit",
    ),
    Fault(
        "publication: adopted weights stay on the host",
        WEIGHTS,
        "        if (parameter.device, parameter.dtype) == (\n            value.device,\n            value.dtype,\n        )",
        "        if (parameter.dtype,) == (value.dtype,)",
        "the network's parameters are the CPU's tensors",
        PARTS,
        "a_version",
    ),
    Fault(
        "publication: an exchange leaves parameters on the host",
        WEIGHTS,
        "        if parameter.device == value.device and",
        "        if parameter.dtype == value.dtype and",
        "a trainer that lends itself computes with the CPU's tensors",
        PARTS,
        "exchanged",
    ),
    Fault(
        "publication: an exchange does not wait",
        WEIGHTS,
        "            value.copy_(own)",
        "            value.pin_memory().copy_(own, non_blocking=True)",
        "a trainer does not get its own weights back",
        PARTS,
        "exchanged",
    ),
    # ---- placement
    Fault(
        "placement: initial noise stays on the CPU",
        DENOISE,
        "    return SampleState(key, noise.to(storage_dtype).to(device))",
        "    return SampleState(key, noise.to(storage_dtype))",
        "the network mixes devices",
        RUNS,
        "one_trainer_and",
    ),
    Fault(
        "placement: a conditioning stays on the CPU",
        CODEC,
        "        return move_tensors(self.trim_condition(condition), self.device)",
        "        return self.trim_condition(condition)",
        "the network mixes devices",
        PARTS,
        "policy_encodes",
    ),
    Fault(
        "placement: what is in tuples is not moved",
        "src/digenrl/types.py",
        "        return tuple(move_tensors(item, device, non_blocking) for item in value)  # type: ignore[return-value]",
        "        return value",
        "half of a batch stays on the CPU",
        PARTS,
        "moved_whole",
    ),
    Fault(
        "placement: the VAE does not come",
        PIPELINE,
        "        decoder.to(device)",
        "        pass",
        "latents of the device meet weights of the CPU",
        PARTS,
        "policy_encodes",
    ),
    Fault(
        "placement: the VAE does not go",
        PIPELINE,
        '            decoder.to("cpu")',
        "            pass",
        "memory that the plan gives to activations is taken",
        PARTS,
        "large_decoder",
    ),
    Fault(
        "placement: encoders do not go",
        PIPELINE,
        '                encoder.to("cpu")',
        "                pass",
        "memory that the plan gives to activations is taken",
        PARTS,
        "policy_encodes",
    ),
    Fault(
        "placement: eval computes on the CPU",
        "src/digenrl/cli/evaluate.py",
        "    module.to(accelerator.device_kind())",
        "    _ = accelerator",
        "an evaluation takes hours beside an idle GPU",
        COMMANDS,
        "test_eval",
    ),
    Fault(
        "placement: the loop in one process computes on the CPU",
        "src/digenrl/api/loop.py",
        "SingleDeviceStrategy(accelerator.current_device())",
        'SingleDeviceStrategy("cpu")',
        "a notebook computes beside an idle GPU",
        COMMANDS,
        "two_steps",
    ),
    # ---- memory
    Fault(
        "memory: a trainer whose device is full drops what it has learned",
        "src/digenrl/strategy/stop_vote.py",
        "            if not self._sharded and self._droppable():",
        "            if False:",
        "the steps since the last checkpoint are lost",
        MEMORY,
        "trainer_that_is_full",
    ),
    Fault(
        "memory: a full device is not named",
        STRATEGY,
        "            if isinstance(exception, torch.OutOfMemoryError):",
        "            if False:",
        "nobody knows which key to change",
        MEMORY,
        "rollout_that_is_full",
    ),
    # ---- generators
    Fault(
        "generator: initial noise is the device's",
        DENOISE,
        "    return SampleState(key, noise.to(storage_dtype).to(device))",
        "    import torch\n\n    noise = torch.randn(noise.shape, device=device)\n    return SampleState(key, noise.to(storage_dtype))",
        "samples depend on the kind of device (I11)",
        RUNS,
        "one_trainer_and",
    ),
    Fault(
        "generator: a CPU generator draws on the device",
        DENOISE,
        "    return SampleState(key, noise.to(storage_dtype).to(device))",
        "    drawn = torch.Generator().manual_seed(key.uid)\n    noise = torch.randn(noise.shape, device=device, generator=drawn)\n    return SampleState(key, noise.to(storage_dtype))",
        "torch refuses a generator of another device",
        RUNS,
        "one_trainer_and",
    ),
    # ---- forks
    Fault(
        "fork: the launcher asks the driver itself",
        DEVICES,
        "    ours, theirs = multiprocessing.Pipe(duplex=False)",
        "    return seen()\n    ours, theirs = multiprocessing.Pipe(duplex=False)",
        "no forked rank can use its GPU",
        RUNS,
        "may_fork",
    ),
    Fault(
        "fork: an import touches the device",
        "src/digenrl/run.py",
        "from __future__ import annotations\n",
        "from __future__ import annotations\nimport torch as _t\n\n_t.zeros(1, device=_t.accelerator.current_accelerator())\n",
        "no forked rank can use its GPU",
        RUNS,
        "may_fork",
    ),
    # ---- numbers of devices
    Fault(
        "number: every rank takes device 0",
        DEVICES,
        "    number = 0 if accelerator.device_count() == 1 else local_rank",
        "    number = 0",
        "all ranks of a machine share its first GPU",
        PARTS,
        "keeps_to_its_ranks",
    ),
    Fault(
        "number: `auto` has none",
        PROTOCOL,
        "    return accelerator.current_device() if unnumbered else resolved",
        "    return resolved",
        "a scorer computes on device 0 in its thread",
        PARTS,
        "keeps_to_its_ranks",
    ),
    Fault(
        "number: a scorer's thread has no device and no stream of its own",
        SCORER,
        "            torch.accelerator.set_device_index(self._device)  # a new thread begins on device 0\n"
        "            # A stream of its own: on the default one, scoring would queue behind the generation\n"
        "            # that it is to overlap.\n"
        "            torch.accelerator.set_stream(torch.Stream(self._device))\n",
        "            pass\n",
        "kernels of a scorer run beside another rank",
        PARTS,
        "keeps_to_its_ranks",
    ),
    Fault(
        "number: a scorer's process takes device 0 (H1)",
        CHILD,
        '"device": device}',
        '"device": None}',
        "the scorers of all ranks fill GPU 0",
        RUNS,
        "scorer_of and process",
    ),
    Fault(
        "number: a collective's tensor is on device 0",
        GRADIENTS,
        "    kind = accelerator.device_kind()\n",
        '    kind = "cuda"\n',
        "nothing but CUDA has trainers in more than one process",
        RUNS,
        "two_trainers and ddp",
    ),
    # ---- host reads
    Fault(
        "host read: media are hashed on the device",
        SCORER,
        '        copy = media.detach().to("cpu", torch.float32, copy=True)',
        "        copy = media.detach().to(torch.float32, copy=True)",
        "numpy reads memory of the device",
        PARTS,
        "media_of_the_device",
    ),
    Fault(
        "host read: media are read before they are there",
        SCORER,
        '        copy = media.detach().to("cpu", torch.float32, copy=True)',
        '        copy = media.detach().to("cpu", torch.float32, copy=True, non_blocking=True)',
        "scores of pictures that have not arrived",
        PARTS,
        "media_of_the_device",
    ),
    Fault(
        "host read: frames stay on the device",
        PROTOCOL,
        '.mul(255).round().to("cpu", torch.uint8)',
        ".mul(255).round().to(torch.uint8)",
        "the encoder of pictures reads memory of the device",
        PARTS,
        "media_of_the_device",
    ),
    # ---- seconds
    Fault(
        "seconds: a span ends when its work is given to the device (H3)",
        "src/digenrl/record/span_log.py",
        "before, self._mark(), took, args)",
        "None, None, took, args)",
        "training is booked as waiting, and the schedule is chosen by it",
        PARTS,
        "spans_last",
    ),
    # ---- evaluation, averages, the end
    Fault(
        "evaluation: media stay on the device",
        ENGINE,
        "policy.codec.decode(latents).cpu()",
        "policy.codec.decode(latents)",
        "a GPU holds all media of an evaluation",
        PARTS,
        "policy_encodes",
    ),
    Fault(
        "evaluation: noise stays on the CPU",
        ENGINE,
        "torch.cat(noise).to(policy.device, wide_dtype(sampling.storage_dtype))",
        "torch.cat(noise).to(wide_dtype(sampling.storage_dtype))",
        "the network mixes devices",
        PARTS,
        "policy_encodes",
    ),
    Fault(
        "checkpoint: an average stays where it was read",
        "src/digenrl/algorithms/copies.py",
        "        self.tensors[name] = copy = self.tensors[name].to(parameter.device)",
        "        self.tensors[name] = copy = self.tensors[name]",
        "the first update after a resume mixes devices",
        PARTS,
        "an_average",
    ),
    Fault(
        "end: networks are copied to the host (H5)",
        STRATEGY,
        "        # Lightning's own would copy the network and the optimizer of every rank to the host.",
        "        super().teardown()",
        "a finished run ends for lack of host memory",
        RUNS,
        "stays_on",
    ),
    Fault(
        "memory: a peak is never forgotten",
        DEVICES,
        "    torch.accelerator.reset_peak_memory_stats(number)\n",
        "",
        "every stage after the fullest one has its peak",
        PEAKS,
        "most_that_each_rank",
    ),
    Fault(
        "collective: gradients are summed in a copy on the host",
        GRADIENTS,
        "        dist.all_reduce(flat)",
        "        dist.all_reduce(flat.cpu())",
        "replicas train their own cells alone",
        RUNS,
        "two_trainers and ddp",
    ),
    Fault(
        "collective: the table of gradients is on the CPU",
        GRADIENTS,
        "dtype=dtype, device=members[0].device",
        "dtype=dtype",
        "the flat gradient mixes devices",
        RUNS,
        "two_trainers and ddp",
    ),
)
