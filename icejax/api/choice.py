"""The choice of a cache where the caller names none: all tokens on the device, or pages in host memory.

`api.generate`, `api.engine` and `Session` call `choose` with the numbers of tokens that are asked for. It compares the bytes of
the two caches with the memory of the device, and the estimated time of their steps by the rates of `runtime.rates`; nothing is
allocated or timed. `icejax doctor` shows the `crossing`.

Example: SmolLM2-135M in fp32 on two CPU cores, 8,192 tokens. A full cache takes 373 MiB, which fit, and a step spends an
estimated 15 ms on it; with the clustered cache 22 ms. So the full cache is chosen.
"""

from __future__ import annotations

import bisect
import dataclasses
from dataclasses import dataclass

import jax

from icejax.cache.protocol import CachePolicy
from icejax.cache.registry import IN_PAGES, ON_DEVICE, display_name
from icejax.cache.sizes import CacheSpec, num_bytes
from icejax.config import ModelConfig
from icejax.engine.buckets import SHORTEST, bucket
from icejax.engine.layout import Layout, make_layout
from icejax.models.decoder import CausalLM
from icejax.runtime import devices, mesh, processes
from icejax.runtime.rates import Rates, rates_of

SHARE = 0.95  # of free device memory that a choice fills: programs and temporary arrays take some too
LEAST_ROOM = 2 * SHORTEST  # tokens; a session does not begin with a smaller full cache
ANSWER = 256  # tokens of an answer, for a crossing
LONGEST = 2**20  # tokens up to which a crossing is searched


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts of a machine that a choice uses.

    Attributes:
        platform, kind: of the device, as `cpu` and `cpu`, or `gpu` and `NVIDIA H200`.
        device_free: free bytes of the device's memory, without the weights.
        host_free: bytes of host memory for pages.
        one_memory: whether both are the same memory, as on a CPU.
    """

    platform: str
    kind: str
    device_free: int
    host_free: int
    one_memory: bool = False

    @property
    def rates(self) -> Rates:
        """The rates of the device."""
        return rates_of(self.platform, self.kind)


@dataclass(frozen=True)
class Choice:
    """A chosen cache.

    Attributes:
        policy: the cache.
        reason: the cache and why it was chosen, in a line; None: nothing was chosen.
        room: tokens that a session's cache has room for; None: its whole context.
    """

    policy: CachePolicy
    reason: str | None
    room: int | None = None


@dataclass(frozen=True)
class Cost:
    """The costs of a cache.

    Attributes:
        device, host: bytes on the device, and in host memory.
        us: estimated microseconds that a decode step spends on it.
    """

    device: int
    host: int
    us: float


def this_machine(model: CausalLM, *, device_memory: int | None = None, host_memory_limit: int | None = None) -> Machine:
    """Returns the machine that runs the model; if several processes do, they take the first one's for their own.

    Args:
        device_memory: bytes of the device's memory; None: what the device reports, on a CPU the machine's free memory.
        host_memory_limit: bytes of host memory that pages may take, of each process; None: all that is free.
    """
    free, size = devices.pinnable(), devices.check_limit(device_memory, name="device_memory")
    free = (free if host_memory_limit is None else min(free, host_memory_limit)) * mesh.processes_of(model.mesh)
    count = mesh.size(model.mesh)
    copies = mesh.holders(model.mesh, latent=model.config.latent is not None)  # of a row's cache
    machine = dict(
        platform=devices.platform(),
        kind=devices.device().device_kind,
        device_free=devices.device_free(model, size, count=count) // copies,
        host_free=free // copies,
        one_memory=devices.platform() == "cpu" and device_memory is None,
    )
    return Machine(**machine if model.mesh is None else processes.from_first(machine))


def session_choice(model: CausalLM, *, context_length: int, device_memory: int | None, host_memory_limit: int | None) -> Choice:
    """Returns the cache for a session on this machine; the limits are those of `this_machine`."""
    machine = this_machine(model, device_memory=device_memory, host_memory_limit=host_memory_limit)
    return choose_for_session(model.config, model.dtype, machine, context_length=context_length)


def batch_choice(model: CausalLM, *, device_memory: int | None, host_memory_limit: int | None, **sizes: int) -> Choice:
    """Returns the cache for a batch on this machine; the limits are those of `this_machine`, `sizes` those of `choose`."""
    machine = this_machine(model, device_memory=device_memory, host_memory_limit=host_memory_limit)
    return choose(model.config, model.dtype, machine, **sizes)


def choose(
    config: ModelConfig, dtype: str, machine: Machine, *, batch_size: int, prompt_tokens: int, new_tokens: int, joins: bool
) -> Choice:
    """Returns the cache for a batch: the full one where it fits and is no slower, else the clustered one.

    Args:
        dtype: dtype of keys and values, by name.
        batch_size: rows that decode at once.
        prompt_tokens, new_tokens: most tokens of a prompt, and of its answer.
        joins: whether rows may join after others have decoded.
    """
    sizes = dict(batch_size=batch_size, prompt_tokens=prompt_tokens, new_tokens=new_tokens, joins=joins)
    full, paged = (_cost(config, dtype, machine, policy, sizes) for policy in (ON_DEVICE, IN_PAGES))
    return _better(full, paged, machine, f"{batch_size} x " * (batch_size > 1) + f"{prompt_tokens + new_tokens:,} tokens")


def choose_for_session(config: ModelConfig, dtype: str, machine: Machine, *, context_length: int) -> Choice:
    """Returns the cache for a session of at most `context_length` tokens.

    Where a full cache of the whole context does not fit, the session begins with one of as many tokens as fit, if its steps
    are faster than those of the clustered cache, to which the session moves when it outgrows them.
    """
    paged = _session_cost(config, dtype, machine, IN_PAGES, context_length)
    full = _session_cost(config, dtype, machine, ON_DEVICE, context_length)
    if _fits(full, machine) or machine.one_memory or paged.host > machine.host_free:
        return _better(full, paged, machine, f"{context_length:,} tokens")
    lengths = [length for length in _lengths() if length < context_length]

    def is_too_large(length: int) -> bool:
        return not _fits(_session_cost(config, dtype, machine, ON_DEVICE, length), machine)

    fitting = bisect.bisect_left(lengths, True, key=is_too_large)
    room = lengths[fitting - 1] if fitting else 0
    if room < LEAST_ROOM or _session_cost(config, dtype, machine, ON_DEVICE, room).us > paged.us:
        return _better(full, paged, machine, f"{context_length:,} tokens")
    names = display_name(ON_DEVICE), _named(IN_PAGES)
    reason = f"{names[0]} for the first {room:,} tokens, as many as fit the device; then {names[1]}"
    return Choice(dataclasses.replace(ON_DEVICE, movable=True), reason, room)


def crossing(config: ModelConfig, dtype: str, *, platform: str, kind: str) -> int | None:
    """Returns the largest number of tokens, `ANSWER` of them an answer's, with which the full cache is no slower; None: any.

    Prompts are padded, so that the caches cross where the prompts' next size begins.
    """
    machine, prompts = Machine(platform=platform, kind=kind, device_free=0, host_free=0), _lengths()

    def full_is_slower(prompt: int) -> bool:
        sizes = dict(batch_size=1, prompt_tokens=prompt, new_tokens=ANSWER)
        full, paged = (_cost(config, dtype, machine, policy, sizes) for policy in (ON_DEVICE, IN_PAGES))
        return paged.us < full.us

    place = bisect.bisect_left(prompts, True, key=full_is_slower)
    if place == len(prompts):
        return None
    return prompts[place - 1] + ANSWER if place else 0


def _better(full: Cost, paged: Cost, machine: Machine, tokens: str) -> Choice:
    """Returns the choice of two caches for `tokens`, which the reason names."""
    if not _fits(full, machine):
        sizes = f"{_size(full.device)}, and the device has room for {_size(max(0, int(SHARE * machine.device_free)))}"
        return Choice(IN_PAGES, f"{_named(IN_PAGES)}: a full cache of {tokens} and its prompt take {sizes}")
    if not _fits(paged, machine):
        sizes = f"{_size(paged.host)} of host memory, and {_size(machine.host_free)} is free"
        return Choice(ON_DEVICE, f"{_named(ON_DEVICE)}: pages of {tokens} take {sizes}")
    policy, other, saved = (
        (IN_PAGES, ON_DEVICE, full.us - paged.us) if paged.us < full.us else (ON_DEVICE, IN_PAGES, paged.us - full.us)
    )
    than = display_name(other)
    return Choice(policy, f"{_named(policy)}: for {tokens} a step is estimated {saved / 1e3:.1f} ms faster than with {than}")


def _session_cost(config: ModelConfig, dtype: str, machine: Machine, policy: CachePolicy, length: int) -> Cost:
    """Returns the cost for a session whose first text takes half of its tokens, which pads about as much as any."""
    sizes = dict(batch_size=1, prompt_tokens=length // 2 + 1, new_tokens=(length - 1) // 2, extends=True)
    return _cost(config, dtype, machine, policy, sizes)


def _cost(config: ModelConfig, dtype: str, machine: Machine, policy: CachePolicy, sizes: dict[str, int]) -> Cost:
    layout = make_layout(config, dtype, policy, platform=machine.platform, **sizes)
    specs = [layout.spec_of(i) for i in range(len(layout.policies))]
    parts = dict[tuple, tuple[int, float]]()  # layers of one kind have one entry
    for pair in zip(layout.policies, specs, strict=True):
        if pair not in parts:
            parts[pair] = _layer_cost(*pair, machine.rates)
    layers = [parts[pair] for pair in zip(layout.policies, specs, strict=True)]
    device = sum(size for size, _ in layers)
    if sizes["batch_size"] > 1:  # a prefilled row has its own arrays until it joins the batch
        device += device // sizes["batch_size"]
    return Cost(device + _activations(config, layout), _pool_bytes(layout), sum(us for _, us in layers))


def _layer_cost(policy: CachePolicy, spec: CacheSpec, rates: Rates) -> tuple[int, float]:
    """Returns the bytes of a layer's state, and the estimated microseconds of a step."""
    reads, group = policy.step_reads(spec), spec.num_heads // spec.num_kv_heads
    us = (reads.device * rates.device + reads.host * (rates.host + rates.scored * group)) / 1e6
    return num_bytes(jax.eval_shape(lambda: policy.init(spec))), us + (rates.layer if policy.pool(spec) is not None else 0)


def _pool_bytes(layout: Layout) -> int:
    return len(layout.pooled) * layout.spec.capacity * layout.spec.token_bytes


def _activations(config: ModelConfig, layout: Layout) -> int:
    """Returns about the bytes of a prompt's input, queries and outputs in a layer; prompts are prefilled one by one."""
    spec = layout.spec
    channels = 2 * config.hidden_size + 2 * spec.num_heads * spec.head_dim
    item = spec.token_bytes // (spec.batch_size * spec.num_kv_heads * sum(spec.planes))
    return spec.prompt_capacity * channels * item


def _fits(cost: Cost, machine: Machine) -> bool:
    if machine.one_memory:
        return cost.device + cost.host <= SHARE * machine.device_free and cost.host <= machine.host_free
    return cost.device <= SHARE * machine.device_free and cost.host <= machine.host_free


def _lengths() -> list[int]:
    """Returns the sizes that prompts are padded to."""
    lengths = [SHORTEST]
    while lengths[-1] < LONGEST:
        lengths.append(bucket(lengths[-1] + 1))
    return lengths


def _named(policy: CachePolicy) -> str:
    return display_name(policy) + ("" if policy.budget is None else f", budget {policy.budget}")


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
