"""Inquiry: what one HTTP request asks of the engine, once its texts are tokens and its limits are kept."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from meshwright.endpoint import bodies
from meshwright.endpoint.grammar import schema_of
from meshwright.endpoint.refusal import Refused, shown
from meshwright.endpoint.seam import EngineFacts, Prompted, Sampling
from meshwright.endpoint.template import ChatTemplate, TemplateRefusal
from meshwright.endpoint.text import ModelText
from meshwright.endpoint.tool_calls import plain_calls, wanted

#: New tokens where nobody says: OpenAI's of completions, SGLang's of ``/generate``; a chat goes on to the end.
COMPLETION_TOKENS, GENERATE_TOKENS = 16, 128
Style = Literal["completion", "chat", "generate"]


class Inquiry(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts as token ids (and ``texts``, "" where they came as ids) with the most new tokens of each (``limits``),
    ``n`` answers to every one, and how they are told: as events (``stream``) with token counts at the end or in each
    (``usage``), with special tokens by name (``special``), behind their prompt (``echo``), with the stop string
    (``keep_stop``), and with the calls of tools apart that the parser ``calls`` reads. ``discard``: no new token was
    wanted, and the one that scores the prompt is dropped."""

    style: Style
    model: str
    prompts: tuple[tuple[int, ...], ...]
    limits: tuple[int, ...]
    sampling: Sampling
    texts: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    usage: Literal["", "end", "each"] = ""
    echo: bool = False
    keep_stop: bool = False
    special: bool = False
    discard: bool = False
    calls: str = ""
    adapter: str = ""
    tenant: int = 0
    priority: int = 0

    def asked(self) -> list[Prompted]:
        """Return a request of the engine for each answer, ``n`` in a row to a prompt, all without a number yet."""
        out = []
        for prompt, limit in zip(self.prompts, self.limits):
            for i in range(self.n):
                sampling = msgspec.structs.replace(self.sampling, seed=(self.sampling.seed + i) % 2**63)
                out.append(
                    Prompted(
                        number=-1,
                        prompt=prompt,
                        limit=limit,
                        sampling=sampling,
                        adapter=self.adapter,
                        tenant=self.tenant,
                        priority=self.priority,
                    )
                )
        return out


class Reader:
    """The reader of bodies for one model: `names` are those it is asked by, the first of which it answers with, and
    `tool_parser` reads its calls of tools ("": nobody said how it writes them)."""

    def __init__(
        self,
        text: ModelText,
        template: ChatTemplate | None,
        facts: EngineFacts,
        names: Sequence[str],
        tool_parser: str = "",
    ):
        self.text, self.template, self.facts, self.names = text, template, facts, tuple(names)
        self.tool_parser = tool_parser

    def completion(self, data: bytes, tenant: int = 0) -> Inquiry:
        """Read the body of ``/v1/completions``.

        Raises:
            Refused: what is wrong with it.
        """
        body = bodies.read(data, bodies.CompletionBody)
        model, adapter = self._model(body.model)
        prompts = self._prompts(body.prompt, special=body.add_special_tokens is not False)
        scores = self._scores(body.logprobs, "logprobs")
        texts = (body.prompt,) if isinstance(body.prompt, str) else tuple(body.prompt)
        limits = tuple(self._limit(len(p), body.max_tokens, "max_tokens", COMPLETION_TOKENS) for p in prompts)
        return self._inquiry(
            "completion",
            body,
            prompts,
            limits,
            model,
            adapter,
            tenant,
            scores,
            echo=bool(body.echo),
            limit_name="max_tokens",
            texts=texts if isinstance(texts[0], str) else ("",) * len(prompts),
        )

    def chat(self, data: bytes, tenant: int = 0) -> Inquiry:
        """Read the body of ``/v1/chat/completions``.

        Raises:
            Refused: what is wrong with it.
        """
        body = bodies.read(data, bodies.ChatBody)
        model, adapter = self._model(body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise Refused(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        scores = self._scores(body.top_logprobs or 0, "top_logprobs") if body.logprobs else None
        tools = wanted(body, self.template, self.tool_parser)
        prompt = self._laid_out(
            body.messages,
            begins=body.add_generation_prompt is not False,
            special=bool(body.add_special_tokens),
            more=(body.chat_template_kwargs or {}) | ({"tools": tools} if tools else {}),
        )
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        limit = self._limit(len(prompt), getattr(body, name), name, None)
        return self._inquiry(
            *("chat", body, (prompt,), (limit,), model, adapter, tenant, scores),
            echo=False,
            limit_name=name,
            calls=self.tool_parser if tools else "",
        )

    def generate(self, data: bytes, tenant: int = 0) -> Inquiry:
        """Read the body of SGLang's ``/generate``.

        Raises:
            Refused: what is wrong with it.
        """
        body = bodies.read(data, bodies.GenerateBody)
        if (body.text is None) == (body.input_ids is None):
            raise Refused(400, "say either text or input_ids", param="text")
        model, adapter = self._model(body.lora_path)
        said = body.sampling_params or bodies.GenerateSampling()
        prompts = self._prompts(body.text if body.input_ids is None else list(body.input_ids), special=True)
        name = "sampling_params.max_new_tokens"
        limit = self._limit(len(prompts[0]), said.max_new_tokens, name, GENERATE_TOKENS)
        same = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        same += ("stop", "stop_token_ids", "ignore_eos", "skip_special_tokens")
        common = {field: getattr(said, field) for field in same}
        sampled = bodies.CompletionBody(
            prompt="",
            max_tokens=said.max_new_tokens,
            min_tokens=said.min_new_tokens,
            seed=said.sampling_seed,
            stream=body.stream,
            **common,
        )
        return self._inquiry(
            "generate", sampled, prompts, (limit,), model, adapter, tenant, None, echo=False, limit_name=name
        )

    def tokenised(self, data: bytes) -> tuple[tuple[int, ...], bool]:
        """Read the body of ``/tokenize``: the ids, and whether their texts are wanted too.

        Raises:
            Refused: what is wrong with it.
        """
        body = bodies.read(data, bodies.TokenizeBody)
        self._model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise Refused(400, "say either prompt or messages", param="prompt")
        if body.messages is not None:
            begins, special = body.add_generation_prompt is not False, bool(body.add_special_tokens)
            ids = self._laid_out(body.messages, begins=begins, special=special, more={})
        else:
            ids = self._encoded(body.prompt or "", special=body.add_special_tokens is not False, param="prompt")
        return ids, bool(body.return_token_strs)

    def detokenised(self, data: bytes) -> str:
        """Read the body of ``/detokenize``: the text of its tokens.

        Raises:
            Refused: what is wrong with it.
        """
        body = bodies.read(data, bodies.DetokenizeBody)
        self._model(body.model)
        return self.text.decode(self._ids(body.tokens, "tokens"), special=True)

    def _inquiry(
        self,
        style: Style,
        body: Any,
        prompts: tuple[tuple[int, ...], ...],
        limits: tuple[int, ...],
        model: str,
        adapter: str,
        tenant: int,
        scores: int | None,
        *,
        echo: bool,
        limit_name: str,
        texts: tuple[str, ...] = ("",),
        calls: str = "",
    ) -> Inquiry:
        """Put together what every style of request says alike."""
        n = body.n or 1
        if body.best_of not in (None, n):
            message = "best_of is not done by this server: say n and logprobs, and keep the likeliest"
            raise Refused(400, message, param="best_of", code="unsupported")
        if len(prompts) * n > bodies.MOST_CHOICES:
            message = f"{len(prompts)} prompts with n={n} are more than {bodies.MOST_CHOICES} answers at a time"
            raise Refused(400, message, param="n" if n > 1 else "prompt")
        if body.stream_options is not None and not body.stream:
            raise Refused(400, "stream_options is of stream: true", param="stream_options")
        least = body.min_tokens or 0
        if least > min(limits):
            raise Refused(400, f"min_tokens={least} is more than {limit_name}={min(limits)}", param="min_tokens")
        discard = min(limits) == 0
        options = body.stream_options or bodies.StreamOptions()
        usage = "each" if options.continuous_usage_stats else "end" if options.include_usage else ""
        return Inquiry(
            style=style,
            model=model,
            prompts=prompts,
            texts=texts,
            limits=tuple(max(1, limit) for limit in limits),
            sampling=self._sampling(body, least, scores, echo),
            n=n,
            stream=bool(body.stream),
            usage=usage,
            echo=echo,
            keep_stop=bool(body.include_stop_str_in_output),
            special=body.skip_special_tokens is False or bool(calls),  # a call may begin with a special token
            calls=calls,
            discard=discard,
            adapter=adapter,
            tenant=tenant,
            priority=body.priority or 0,
        )

    def _sampling(self, body: Any, least: int, scores: int | None, echo: bool) -> Sampling:
        usual = self.text.usual
        stop_ids = tuple(self._ids(body.stop_token_ids or (), "stop_token_ids"))
        top_k = usual.get("top_k", 0) if body.top_k is None else max(0, body.top_k)
        repeated = body.repetition_penalty
        return Sampling(
            temperature=float(usual.get("temperature", 1.0) if body.temperature is None else body.temperature),
            top_p=float(usual.get("top_p", 1.0) if body.top_p is None else body.top_p) or 1.0,
            top_k=min(top_k, self.facts.vocabulary),
            min_p=float(body.min_p or 0.0),
            presence_penalty=float(body.presence_penalty or 0.0),
            frequency_penalty=float(body.frequency_penalty or 0.0),
            repetition_penalty=float(usual.get("repetition_penalty", 1.0) if repeated is None else repeated),
            logit_bias=self._biases(body.logit_bias or {}),
            seed=secrets.randbits(62) if body.seed is None else body.seed % 2**63,
            stop=_stops(body.stop),
            stop_ids=stop_ids,
            ignore_eos=bool(body.ignore_eos),
            min_tokens=least,
            schema=schema_of(getattr(body, "response_format", None), least=least),
            logprobs=scores,
            prompt_logprobs=scores if echo else None,
        )

    def _biases(self, said: dict[str, float]) -> tuple[tuple[int, float], ...]:
        if len(said) > bodies.MOST_BIASES:
            message = f"logit_bias: {len(said):,} tokens are more than {bodies.MOST_BIASES:,}"
            raise Refused(400, message, param="logit_bias")
        wrong = next((id for id in said if not (id.isascii() and id.isdecimal() and len(id) < 12)), None)
        if wrong is not None:
            message = f"logit_bias: {shown(wrong)!r} is no token's number"
            raise Refused(400, message, param="logit_bias")
        return tuple(zip(self._ids([int(id) for id in said], "logit_bias"), said.values())) if said else ()

    def _model(self, said: str | None) -> tuple[str, str]:
        """The name to answer with, and the adapter that is meant ("" for none)."""
        if not said or said in self.names:
            return said or self.names[0], ""
        if said in self.facts.adapters:
            return said, said
        served = ", ".join((*self.names[:1], *self.facts.adapters))
        message = f"there is no model {shown(said)!r} here, but {served}"
        raise Refused(404, message, param="model", code="model_not_found")

    def _prompts(self, said: Any, *, special: bool) -> tuple[tuple[int, ...], ...]:
        """The ids of a prompt in each of its four forms."""
        if isinstance(said, str):
            return (self._encoded(said, special=special, param="prompt"),)
        kinds = {type(one) for one in said}
        if not said or len(kinds) > 1:
            reason = "is empty" if not said else "mixes texts and tokens"
            raise Refused(400, f"the prompt {reason}", param="prompt")
        if kinds == {int}:
            return (self._ids(said, "prompt"),)
        if len(said) > bodies.MOST_CHOICES:
            raise Refused(400, f"{len(said)} prompts are more than {bodies.MOST_CHOICES} at a time", param="prompt")
        if kinds == {str}:
            return tuple(self._encoded(one, special=special, param="prompt") for one in said)
        return tuple(self._ids(one, "prompt") for one in said)

    def _encoded(self, text: str, *, special: bool, param: str) -> tuple[int, ...]:
        try:
            found = self.text.encode(text, special=special)
        except UnicodeEncodeError:
            raise Refused(400, f"{param} holds half a character (a lone surrogate)", param=param) from None
        return self._ids(found, param)

    def _ids(self, ids: Sequence[int], param: str) -> tuple[int, ...]:
        if not ids and param != "stop_token_ids":
            raise Refused(400, f"{param} has no tokens", param=param)
        wrong = next((id for id in ids if not 0 <= id < self.facts.vocabulary), None)
        if wrong is not None:
            message = f"{param}: the token {wrong} is none of the {self.facts.vocabulary:,} of this model"
            raise Refused(400, message, param=param)
        return tuple(ids)

    def _laid_out(
        self, messages: list[dict[str, Any]], *, begins: bool, special: bool, more: dict[str, Any]
    ) -> tuple[int, ...]:
        """The ids of messages in the model's own template."""
        if self.template is None:
            message = "this model has no chat template: ask /v1/completions"
            raise Refused(400, message, param="messages", code="no_chat_template")
        plain = [_message(message, i) for i, message in enumerate(messages)]
        try:
            text = self.template.render(plain, begins=begins, more=more)
        except TemplateRefusal as error:
            raise Refused(400, f"messages: {shown(str(error), 300)}", param="messages") from None
        return self._encoded(text, special=special, param="messages")

    def _limit(self, prompt: int, said: int | None, name: str, usual: int | None) -> int:
        """The most new tokens, which together with the prompt have to fit the model's context and the cache."""
        most = self.facts.longest
        what = "the model's context" if self.facts.context == most else "the engine's KV cache"
        if prompt >= most:
            message = f"a prompt of {prompt:,} tokens leaves no room for an answer: {what} is {most:,} tokens long"
            raise Refused(400, message, param="prompt", code="context_length_exceeded")
        if said is None:
            return most - prompt if usual is None else min(usual, most - prompt)
        if prompt + said > most:
            message = (
                f"{prompt:,} tokens of prompt and {name}={said:,} are more than the {most:,} of {what}: "
                f"shorten the prompt, or say {name}={most - prompt}"
            )
            raise Refused(400, message, param=name, code="context_length_exceeded")
        return said

    def _scores(self, count: int | None, param: str) -> int | None:
        if count is not None and count > self.facts.most_logprobs:
            raise Refused(400, f"{param}={count} is more than {self.facts.most_logprobs}", param=param)
        return count


def _stops(said: str | list[str] | None) -> tuple[str, ...]:
    stops = (said,) if isinstance(said, str) else tuple(said or ())
    if len(stops) > bodies.MOST_STOPS:
        raise Refused(400, f"{len(stops)} stop strings are more than {bodies.MOST_STOPS}", param="stop")
    for stop in stops:
        if not stop or len(stop) > bodies.LONGEST_STOP:
            raise Refused(400, f"a stop string has 1 to {bodies.LONGEST_STOP} characters", param="stop")
    return stops


def _message(message: dict[str, Any], place: int) -> dict[str, Any]:
    """One message with its content as one text.

    Raises:
        Refused: it has no role, or holds something else than text.
    """
    param = f"messages[{place}]"
    if not isinstance(message.get("role"), str):
        raise Refused(400, f"{param} has no role", param=f"{param}.role")
    if message.get("tool_calls") is not None:
        message = {**message, "tool_calls": plain_calls(message["tool_calls"], f"{param}.tool_calls")}
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        kinds = [part.get("type", "text") if isinstance(part, dict) else "text" for part in content]
        if any(kind != "text" for kind in kinds) or not all(isinstance(text, str) for text in texts):
            raise Refused(400, f"{param} holds something else than text", param=f"{param}.content", code="unsupported")
        return {**message, "content": "".join(texts)}
    if content is not None and not isinstance(content, str):
        raise Refused(400, f"{param} has a content that is no text", param=f"{param}.content")
    return message
