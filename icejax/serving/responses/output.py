"""A response and its events, from the pieces of an answer. Whole and streamed responses are made by the same code.

An answer's thoughts are an item of type `reasoning`, its text an item of type `message`, each with one part. A call of a
function is an item of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from icejax.engine.response import GenerationResponse
from icejax.serving.answers import Usage, new_id
from icejax.serving.errors import ApiError
from icejax.serving.responses.asked import ResponsesTool, custom_input
from icejax.serving.streaming import named_event
from icejax.serving.tools.asked import arguments_object
from icejax.serving.tools.calls import Call
from icejax.serving.tools.events import CallArguments, CallBegin, CallEnd, Event


class Form(NamedTuple):
    """How a kind of text is named: in items, parts and events.

    Attributes:
        kind, mark: the item's type, and the beginning of its id.
        parts, part: the item's list of parts, and the type of its part.
        of_part, of_text, index: the events of a part and of its text, and the name of its place in the list.
        fields: other fields of a new item.
    """

    kind: str
    mark: str
    parts: str
    part: str
    of_part: str
    of_text: str
    index: str
    fields: dict[str, Any]


TEXT = Form("message", "msg", "content", "output_text", "content_part", "output_text", "content_index", dict(role="assistant"))
THOUGHTS = Form(
    "reasoning", "rs", "content", "reasoning_text", "content_part", "reasoning_text", "content_index", dict(summary=[])
)
SUMMARY = Form(
    "reasoning", "rs", "summary", "summary_text", "reasoning_summary_part", "reasoning_summary_text", "summary_index", {}
)


class CallForm(NamedTuple):
    """How a call's item is named: the beginning of its id, its type, and the field of what the call brings."""

    mark: str
    kind: str
    field: str


FUNCTION, CUSTOM = CallForm("fc", "function_call", "arguments"), CallForm("ctc", "custom_tool_call", "input")


class Output:
    """A response that grows.

    Attributes:
        response: OpenAI's object.
    """

    def __init__(self, response: dict[str, Any], usage: Usage, *, thoughts: Form, tools: Mapping[str, ResponsesTool]) -> None:
        """Begins before the first piece.

        Args:
            response: the fields that do not change.
            usage: token counts, which are those of the answer at its end.
            thoughts: the form of the model's thoughts.
            tools: the tools that the model may call, by their names in a chat.
        """
        about = dict(id=new_id("resp", "_"), object="response", created_at=int(time.time()), status="in_progress")
        self.response = about | response | dict(output=[], error=None, incomplete_details=None, usage=None)
        self._usage, self._thoughts, self._tools, self._count = usage, thoughts, tools, 0
        self._open: Form | None = None
        self._call: Call | None = None  # the newest
        self._held = list[dict[str, Any]]()  # log-probabilities of tokens whose text comes with a later one

    def begun(self) -> list[bytes]:
        """Returns the events before the first piece."""
        return [self._event(f"response.{name}", response=self.response) for name in ("created", "in_progress")]

    def waits(self) -> bytes:
        """Returns an event that tells nothing new: Codex leaves after 5 minutes without one, and counts no comments."""
        return self._event("response.in_progress", response=self.response)

    def take(
        self, piece: GenerationResponse, parts: Sequence[tuple[Call | None, Event]], logprobs: list[dict[str, Any]]
    ) -> list[bytes]:
        """Returns the events of a piece.

        Args:
            parts: what `CallsOf` reads in its text.
            logprobs: of its tokens.
        """
        events = self._grown(self._thoughts, piece.reasoning or "", [])
        logprobs = self._held + logprobs
        self._held = [] if parts or piece.reasoning else logprobs  # a token may have no text yet
        for call, event in parts:
            events += self._grown(TEXT, event.text, logprobs) if call is None else self._of_call(call, event)
            logprobs = logprobs if call else []  # a piece may have two texts
        if piece.finish_reason is not None:
            events += self._ended("completed" if piece.finish_reason == "stop" else "incomplete")
        return events

    def failed(self, error: ApiError) -> bytes:
        """Returns the event of an error."""
        self.response |= dict(status="failed", error=dict(code=error.code or "server_error", message=error.message))
        return self._event("response.failed", response=self.response)

    def _of_call(self, call: Call, event: Event) -> list[bytes]:
        match event:
            case CallBegin(_, name):
                closed, self._call = self._closed("completed"), call
                tool = self._tools.get(name)
                mark, kind, field = CUSTOM if tool is not None and tool.is_custom else FUNCTION
                named = dict(name=name) if tool is None else tool.named()  # a model may call what nobody gave it
                item = dict(id=new_id(mark, "_"), type=kind, status="in_progress", call_id=call.id)
                return [*closed, self._added(item | named | {field: ""})]
            case CallArguments(_, text):
                if self._item["type"] == CUSTOM.kind:
                    return []  # the text is known when the JSON around it is
                self._item["arguments"] += text
                return [self._of_item("response.function_call_arguments.delta", delta=text)]
            case CallEnd():  # also of a call that was cut
                return self._closed("completed" if isinstance(arguments_object(call.arguments), dict) else "incomplete")

    def _grown(self, form: Form, text: str, logprobs: list[dict[str, Any]]) -> list[bytes]:
        """Returns the events of new text; none if it is empty."""
        if not text:
            return []
        events = [] if self._open is form else self._closed("completed") + self._opened(form)
        part = self._item[form.parts][0]
        part["text"] += text
        if form is TEXT:
            part["logprobs"] += logprobs
        named = dict(logprobs=logprobs) if form is TEXT else {}
        return [*events, self._of_item(f"response.{form.of_text}.delta", **{form.index: 0}, delta=text, **named)]

    def _opened(self, form: Form) -> list[bytes]:
        self._open = form
        item = dict(id=new_id(form.mark, "_"), type=form.kind, status="in_progress", **form.fields) | {form.parts: []}
        begun = self._added(item)
        item[form.parts] = [dict(type=form.part, text="") | (dict(annotations=[], logprobs=[]) if form is TEXT else {})]
        return [begun, self._of_item(f"response.{form.of_part}.added", **{form.index: 0}, part=item[form.parts][0])]

    def _added(self, item: dict[str, Any]) -> bytes:
        self.response["output"].append(item)
        return self._event("response.output_item.added", output_index=self._index, item=item)

    def _closed(self, status: str) -> list[bytes]:
        """Returns the events that end the newest item; none if it has ended."""
        form, self._open = self._open, None
        if not self.response["output"] or self._item["status"] != "in_progress":
            return []
        item = self._item
        item["status"] = status
        if form is None and item["type"] == CUSTOM.kind:
            text = item["input"] = custom_input(self._call.arguments)
            of = "response.custom_tool_call_input"
            done = [self._of_item(f"{of}.delta", delta=text), self._of_item(f"{of}.done", input=text)]
        elif form is None:
            done = [self._of_item("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])]
        else:
            at, part = {form.index: 0}, item[form.parts][0]
            named = dict(logprobs=part["logprobs"]) if form is TEXT else {}
            done = [self._of_item(f"response.{form.of_text}.done", **at, text=part["text"], **named)]
            done.append(self._of_item(f"response.{form.of_part}.done", **at, part=part))
        return [*done, self._event("response.output_item.done", output_index=self._index, item=item)]

    def _ended(self, status: str) -> list[bytes]:
        events = [] if self.response["output"] else self._opened(TEXT)  # an answer without any text
        events += self._closed(status)
        details = None if status == "completed" else dict(reason="max_output_tokens")
        self.response |= dict(status=status, incomplete_details=details, completed_at=int(time.time()), usage=self._counts())
        return [*events, self._event(f"response.{status}", response=self.response)]

    def _counts(self) -> dict[str, Any]:
        usage = self._usage
        return dict(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=dict(cached_tokens=usage.cached_tokens, cache_write_tokens=0),
            output_tokens=usage.new_tokens,
            output_tokens_details=dict(reasoning_tokens=usage.reasoning_tokens),
            total_tokens=usage.prompt_tokens + usage.new_tokens,
        )

    @property
    def _item(self) -> dict[str, Any]:
        return self.response["output"][-1]

    @property
    def _index(self) -> int:
        return len(self.response["output"]) - 1

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item["id"], output_index=self._index, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._count = self._count, self._count + 1
        return named_event(dict(type=kind, sequence_number=number, **fields))
