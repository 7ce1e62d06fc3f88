"""icejax as a model of lm-evaluation-harness: `lm_eval.simple_evaluate(model=HarnessModel(model, tokenizer), tasks=[...])`.

The harness has the tasks and the scorers, and `icejax.stream_generate` answers its requests. A log-likelihood forces the
continuation token by token through the cache, so it is that of the cache policy, not that of exact attention. The command
``icejax evaluate`` calls it. It needs the extra `evaluate` (lm-eval, MIT).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from icejax.api.generate import stream_generate
from icejax.api.prompts import check_context
from icejax.cache.protocol import CachePolicy
from icejax.cache.registry import ON_DEVICE, display_name
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer
from icejax.engine.request import Request
from icejax.engine.response import GenerationResponse, join
from icejax.engine.sampling import Sampling
from icejax.evaluation import conversation
from icejax.evaluation.answers import Answers
from icejax.models.decoder import CausalLM
from icejax.runtime import devices
from icejax.text.chat_messages import checked_messages
from icejax.text.chat_template import render
from icejax.text.encode import encode

MEASURED = ("prompt_tokens", "new_tokens", "ttft_s", "compile_s", "tpot_s")  # of a response
RESERVED = ("device_kv_bytes", "digest_bytes", "host_kv_bytes")  # of its run
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # names of generation_kwargs that `Sampling` has


class HarnessModel(TemplateLM):
    """A model with a cache policy, as the harness calls it.

    Attributes:
        model, tokenizer, cache: as in `icejax.generate`.
        batch_size: rows that decode at once.
        max_length: maximum number of tokens of a prompt and its answer; a longer prompt loses its beginning.
        max_gen_toks: maximum number of answer tokens of tasks that name none.
        answers: the answers so far, which are not computed again.
        asked: keys of the answers of each task, by its name.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Any,
        *,
        cache: CachePolicy = ON_DEVICE,
        batch_size: int = 4,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        host_memory_limit: int | None = None,
        answers: Answers | None = None,
        stream: Callable[..., Iterable[GenerationResponse]] | None = None,
    ) -> None:
        """Checks the options.

        Args:
            stream: answers requests elsewhere, called as `stream_generate` without model and tokenizer; None: the model does.

        Raises:
            InputError: an option is out of range.
        """
        super().__init__()
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.batch_size = integer("batch_size", batch_size, most=2**16)
        self.max_length = integer("max_length", check_context(model, max_length), least=2)
        self.max_gen_toks = integer("max_gen_toks", max_gen_toks, most=2**31)
        self.answers = Answers() if answers is None else answers
        self.asked: dict[str | None, set[str]] = defaultdict(set)
        self._host_memory_limit, self._tasks, self._elsewhere = host_memory_limit, [], stream

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text; InputError if the tokenizer has none."""
        if self.tokenizer.eos_token_id is None:
            raise InputError("the tokenizer names no eos token, and the task needs one: expected eos_token in its config")
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context, as in the harness's own model of transformers: bos, or else eos."""
        return self.eot_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's own caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Returns the token ids of a text; names of control tokens are these tokens, and a bos is not doubled."""
        return encode(self.tokenizer, string, special_tokens=add_special_tokens is not False, parse_special=True)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns a chat in the tokenizer's template, rendered in a process of its own; a last answer is continued."""
        del add_generation_prompt  # the harness sets it where the last message is the assistant's
        return str(render(self.tokenizer, checked_messages("messages", chat_history), now=conversation.STARTED))

    @property
    def place(self) -> dict[str, Any]:
        """What the times of an answer depend on: the number of rows, and the device."""
        return dict(batch_size=self.batch_size, device=devices.device_name())

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Returns, for contexts and continuations, log-likelihoods and whether each token is the most likely one."""
        self._tasks = [request.task_name for request in requests]  # the harness hands on texts and tokens alone
        return super().loglikelihood(requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of whole texts, in windows of `max_length` tokens; each token counts once."""
        windows: list[tuple[list[int], list[int]]] = []
        counts = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            # The harness counts the tokens that go into a model; the last token of a window does not.
            rolling = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length - 1, context_len=1)
            parts = [make_disjoint_window(part) for part in rolling]
            windows += parts
            counts.append(len(parts))
        self._tasks = [request.task_name for request, n in zip(requests, counts, strict=True) for _ in range(n)]
        values = self._loglikelihood_tokens([(None, *window) for window in windows], disable_tqdm=disable_tqdm)
        totals = iter(value for value, _ in values)
        return [sum(next(totals) for _ in range(count)) for count in counts]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        def forced(context: list[int], continuation: list[int]) -> Request:
            room = self.max_length - len(continuation)
            return Request(prompt=context[-room:], forced_tokens=continuation, logprobs=1)

        def read(response: GenerationResponse) -> list[float | bool]:
            greedy = all(token.chosen.token_id == token.top[0].token_id for token in response.logprobs)
            return [sum(token.chosen.logprob for token in response.logprobs), greedy]

        asked = [
            (forced(context, continuation), ["loglikelihood", context, continuation]) for _, context, continuation in requests
        ]
        answers = self._answered(asked, self._tasks, read, "log-likelihoods", disable_tqdm)
        return [(value, greedy) for value, greedy in answers]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the answers to prompts, each up to a stop string, an end or its number of tokens.

        A prompt that comes several times (`repeats` of a task) gets as many answers if they are drawn, each with its own draws.
        """
        asked, times = [], Counter[str]()
        for request in requests:
            one, name = self._request(*request.args), ["generate_until", *request.args]
            if one.sampling.samples:
                times[key := self.answers.key(name)] += 1
                name.append(times[key])
                one = replace(one, seed=int(self.answers.key(name)[:8], 16))  # whatever the order, also of a run that continues
            asked.append((one, name))
        return self._answered(asked, _tasks(requests), lambda response: response.text, "answers", disable_tqdm)

    def token_logprobs(self, requests: list[Instance], disable_tqdm: bool = False) -> list[list[float]]:
        """Returns the log-probabilities of forced tokens, for (name, tokens, how many of the last ones are forced)."""
        asked = [
            (Request(prompt=tokens[:-count], forced_tokens=tokens[-count:], logprobs=0), ["token_logprobs", tokens, count])
            for _, tokens, count in (request.args for request in requests)
        ]

        def read(response: GenerationResponse) -> list[float]:
            return [token.chosen.logprob for token in response.logprobs]

        return self._answered(asked, _tasks(requests), read, "log-probabilities", disable_tqdm)

    def converse(self, requests: list[Instance], disable_tqdm: bool = False) -> list[list[str]]:
        """Returns the answers to questions about texts, each text in a session of its own (`evaluation.conversation`)."""
        keys = [self.answers.key(["converse", *request.args]) for request in requests]
        waiting = [(key, request.args) for key, request in zip(keys, requests, strict=True) if key not in self.answers]
        with self._bar("sessions", len(keys), len(waiting), disable_tqdm) as bar:
            for key, (text, options) in waiting:
                limits = dict(cache=self.cache, host_memory_limit=self._host_memory_limit)
                responses = conversation.answers(self.model, self.tokenizer, text, **limits, **options)
                self.answers.add(key, [response.text for response in responses], self._measured(responses[-1]))
                bar.update()
        for key, task in zip(keys, _tasks(requests), strict=True):
            self.asked[task].add(key)
        return [self.answers[key] for key in keys]

    def _request(self, context: str, generation: dict[str, Any]) -> Request:
        try:
            options = dict(normalize_gen_kwargs(generation, self.max_gen_toks))
        except (TypeError, ValueError) as error:
            raise InputError(
                f"generation_kwargs cannot be read ({error}): expected numbers of tokens and a temperature"
            ) from None
        stop, count, samples = options.pop("until"), options.pop("max_gen_toks"), options.pop("do_sample")
        sampling = dict(temperature=1.0) | {name: options.pop(name) for name in SAMPLING if name in options}  # as transformers
        if options:
            raise InputError(f"generation_kwargs has {', '.join(options)}: expected until, max_gen_toks, {', '.join(SAMPLING)}")
        if count >= self.max_length:
            raise InputError(f"a task asks for {count} new tokens, and --context-length is {self.max_length}: raise it")
        prompt = self.tok_encode(context)[-(self.max_length - count) :] or [self.prefix_token_id]
        greedy = dict(temperature=0.0) if not samples else {}
        stop = [text for text in stop if text]
        return Request(prompt=prompt, max_new_tokens=count, stop=stop, sampling=Sampling(**sampling | greedy))

    def _answered(
        self,
        asked: list[tuple[Request, list]],
        tasks: list[str | None],
        read: Callable[[GenerationResponse], Any],
        what: str,
        quiet: bool,
    ) -> list[Any]:
        """Returns the answers to requests, each named by a list for the record of answers; the longest prompts run first."""
        keys = [self.answers.key(name) for _, name in asked]
        for key, task in zip(keys, tasks, strict=True):
            self.asked[task].add(key)
        waiting = {key: request for (request, _), key in zip(asked, keys, strict=True) if key not in self.answers}
        order = sorted(waiting, key=lambda key: -len(waiting[key].prompt))
        pieces: dict[int, list[GenerationResponse]] = defaultdict(list)
        with self._bar(what, len(keys), len(order), quiet) as bar:
            for piece in self._stream([waiting[key] for key in order]):
                pieces[piece.row].append(piece)
                if piece.finish_reason is not None:
                    response = join(pieces.pop(piece.row))
                    self.answers.add(order[piece.row], read(response), self._measured(response))
                    bar.update()
        return [self.answers[key] for key in keys]

    def _measured(self, response: GenerationResponse) -> dict[str, Any]:
        of_answer = {name: getattr(response, name) for name in MEASURED}
        return of_answer | {name: getattr(response.run, name) for name in RESERVED} | self.place

    def _bar(self, what: str, total: int, left: int, quiet: bool) -> tqdm:
        """Returns the progress bar of some answers; unless it is quiet, the environment's TQDM_DISABLE decides."""
        hidden = dict(disable=True) if quiet else {}
        return tqdm(total=total, initial=total - left, desc=f"{display_name(self.cache)}: {what}", **hidden)

    def _stream(self, requests: list[Request]):
        if not requests:
            return iter(())
        limits = dict(batch_size=self.batch_size, context_length=self.max_length, host_memory_limit=self._host_memory_limit)
        if self._elsewhere is not None:
            return self._elsewhere(requests, cache=self.cache, **limits)
        return stream_generate(self.model, self.tokenizer, requests, cache=self.cache, **limits)


def _tasks(requests: list[Instance]) -> list[str | None]:
    return [request.task_name for request in requests]
