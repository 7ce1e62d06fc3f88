"""`/tokenize` and `/detokenize`, as vLLM has them: benchmarks make prompts of a length by them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from icejax.serving.errors import ApiError
from icejax.serving.guard import read_body
from icejax.serving.parameters import checked
from icejax.serving.routes.chat import chat_text
from icejax.serving.schemas import DetokenizeRequest, TokenizeRequest, parsed
from icejax.serving.service import Service
from icejax.serving.streaming import json_response
from icejax.text.detokenize import decoded
from icejax.text.encode import encode


async def tokenize(request: Request) -> Response:
    """Returns the token ids of a text, or of messages in the chat template, and their number."""
    service: Service = request.app.state.service
    service.check_ready()
    fields = parsed(TokenizeRequest, await read_body(request))
    service.check_model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise ApiError(400, "expected a 'prompt' or 'messages', one of them", param="prompt")

    def tokens() -> list[int]:
        if fields.messages is not None:
            return encode(service.tokenizer, chat_text(service, fields))
        if not fields.prompt:
            return []
        return service.tokens(fields.prompt, special_tokens=fields.add_special_tokens is not False, parse_special=True)

    ids = await service.in_thread(tokens)
    names = service.tokenizer.convert_ids_to_tokens(ids) if fields.return_token_strs else None
    return json_response(dict(count=len(ids), max_model_len=service.engine.context_length, tokens=ids, token_strs=names))


async def detokenize(request: Request) -> Response:
    """Returns the text of token ids."""
    service: Service = request.app.state.service
    service.check_ready()
    fields = parsed(DetokenizeRequest, await read_body(request))
    service.check_model(fields.model)
    known = service.model.config.vocab_size
    if max(fields.tokens, default=0) >= known:
        raise ApiError(400, f"tokens has {max(fields.tokens)} and the model knows {known}", param="tokens")
    text = await service.in_thread(lambda: checked("tokens", lambda: decoded(service.tokenizer, fields.tokens)))
    return json_response(dict(prompt=text))
