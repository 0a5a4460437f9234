"""What a server is: an ordinary one, or a draft, target or coordinator of several processes.

None          an engine; with ``draft_endpoint`` its drafts come from services
draft         drafts for others over gRPC; HTTP has its health and metrics
target        an engine for coordinators over gRPC, and an ordinary server over HTTP
coordinator   the API of a target and its draft services; it has a tokenizer and no weights
vllm          vLLM's server as a child process, whose /v1 passes through (vllm/)

An encoder is served for its embeddings or scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter

from attar.chat_template import PLAIN_NOTE
from attar.checkpoint import open_checkpoint
from attar.checkpoint.geometry import geometry
from attar.errors import ModelError, SettingsError
from attar.runtime.admission import Limits
from attar.runtime.encoder import is_encoder
from attar.runtime.llm import LLM
from attar.serving.http.app import create_app
from attar.serving.http.backend import Backend, EngineBackend, MetricSample, Stats
from attar.serving.http.embeddings.embedders import Embedder, EncoderThread, EngineEmbedder
from attar.serving.http.load_models import (
    compared_model,
    encoder_facts,
    engine_embedder,
    first_options,
    load_encoder,
    named_models,
)
from attar.serving.http.lora_adapters import LoadedAdapter, first_adapters
from attar.serving.http.model_table import ServedModel
from attar.serving.http.run import run
from attar.serving.http.settings import ServeCommand
from attar.serving.http.tokenizer import ServerTokenizer
from attar.serving.services.settings import KEY_VARIABLE


def serve_ordinary(command: ServeCommand) -> None:
    """An engine and its API in one process."""
    if is_encoder(open_checkpoint(command.model).config):
        if command.lora:
            raise SettingsError("lora", command.model, "adapters of a causal model")
        serve_encoder(command)
        return
    first = replace(command, options=first_options(command))
    pooling = command.embeddings.of_causal
    with ExitStack() as stack:
        samples: Callable[[], Sequence[MetricSample]] = tuple
        with command.progress.task("load", total=1) as task:
            if command.services.draft_endpoint:
                llm, samples = _with_drafters(first, stack)
            else:
                llm = LLM(command.model, embeddings=pooling is not None, **first.options)
            task.advance()
        adapters = first_adapters(command.lora, llm.engine.runner)
        _serve_engine(command, llm, EngineBackend(llm.streams(), samples), adapters)


def serve_encoder(command: ServeCommand) -> None:
    """An encoder, which makes embeddings or scores and completes nothing."""
    with command.progress.task("load", total=1) as task:
        encoder = load_encoder(command, command.model)
        task.advance()
    kind = "scores pairs" if encoder.scores else f"embeds by {encoder.pooling}"
    command.show(f"{encoder.name} is an encoder, and {kind}: {encoder.context:,} tokens a text")
    thread = EncoderThread(encoder)
    _run(command, thread, encoder.tokenizer, encoder_facts(encoder), embedder=thread)


def serve_draft(command: ServeCommand) -> None:
    """A service that drafts for others."""
    from attar.serving.services.build import hello_of_model, load_draft_service
    from attar.serving.services.channel import DRAFT, Network, check_files, listen
    from attar.serving.services.draft_stream import serve_drafts

    services = command.services
    security = security_of(command)
    check_files(security)
    network = Network()
    with ExitStack() as stack:
        stack.callback(network.close)
        with command.progress.task("load", total=1) as task:
            service, loaded = load_draft_service(command.model, command.options)
            stack.callback(service.close)
            service.tracer = command.tracer
            task.advance()
        hello = hello_of_model("draft", loaded)
        methods = {DRAFT: lambda stream: serve_drafts(stream, service, hello)}
        server, port = network.run(listen(methods, command.settings.address, services.grpc_port, security))
        stack.callback(lambda: network.run(server.stop(0.5)))
        backend = DraftBackend(service, loaded.runner.context, hello.vocabulary)
        command.show(f"{loaded.name} drafts with {service.proposer.name}")
        _show_grpc(command, port)
        _run(command, backend, loaded.tokenizer, {"model": loaded.name, "role": "draft"})


def serve_target(command: ServeCommand) -> None:
    """An engine for coordinators. Their draft services draft for it, unless it drafts itself."""
    from attar.serving.http.remote_backend import load_of, offer_samples
    from attar.serving.services.build import hello_of, load_with_offers
    from attar.serving.services.channel import TARGET, Network, check_files, listen
    from attar.serving.services.target_service import TargetService

    security = security_of(command)
    check_files(security)
    network, service = Network(), TargetService()
    service.tracer = command.tracer
    with ExitStack() as stack:
        stack.callback(network.close)
        samples: Callable[[], Sequence[MetricSample]] = tuple
        with command.progress.task("load", total=1) as task:
            embeds = command.embeddings.of_causal is not None
            if command.options.get("speculate") or command.options.get("draft"):
                llm = LLM(command.model, embeddings=embeds, **command.options)
            else:
                llm, proposer = load_with_offers(command.model, service.pool, command.options, embeds)
                samples = partial(offer_samples, proposer.counts)
            task.advance()
        runner, vocabulary = llm.engine.runner, llm.engine.vocabulary
        service.hello = hello_of("target", llm.name, llm.tokenizer, vocabulary, runner.context)
        service.streams = streams = llm.streams()
        backend = EngineBackend(streams, samples)
        service.load = lambda: load_of(backend.stats())
        work = listen({TARGET: service.serve}, command.settings.address, command.services.grpc_port, security)
        server, port = network.run(work)
        stack.callback(lambda: network.run(server.stop(0.5)))
        _show_grpc(command, port)
        _serve_engine(command, llm, backend)


def serve_coordinator(command: ServeCommand) -> None:
    """The API of a target service and its draft services."""
    from attar.checkpoint import open_checkpoint
    from attar.runtime.loading import tokenizer_of
    from attar.serving.http.remote_backend import RemoteBackend
    from attar.serving.services.build import hello_of
    from attar.serving.services.channel import Network, check_files
    from attar.serving.services.coordinator import Coordinator

    services, security = command.services, security_of(command)
    check_files(security)
    checkpoint, pooling = open_checkpoint(command.model), command.embeddings.of_causal
    tokenizer = tokenizer_of(checkpoint)
    if tokenizer is None:
        raise ModelError(f"{command.model} has no tokenizer, which a coordinator needs")
    network = Network()
    with ExitStack() as stack:
        stack.callback(network.close)
        hello = hello_of("coordinator", command.model, tokenizer, len(tokenizer))
        assert services.target_endpoint is not None, "a coordinator has a target"
        target, drafters = services.target_endpoint, services.draft_endpoint
        coordinator = Coordinator(target, drafters, hello, network, security)
        command.show(f"joins {', '.join((target, *drafters))}")
        backend = RemoteBackend(coordinator, len(tokenizer), command.tracer)
        width = geometry(checkpoint.config, "").hidden or 0
        embedder = EngineEmbedder(backend, pooling, width) if pooling else None
        _run(command, backend, tokenizer, {"model": command.model, "role": "coordinator"}, embedder=embedder)


def serve_vllm(command: ServeCommand) -> None:
    """attar's page, keys and limits in front of vLLM's server."""
    from attar.runtime.loading import tokenizer_of
    from attar.serving.http.vllm.flags import vllm_options
    from attar.serving.http.vllm.forward import SEQUENCES, VllmBackend, make_forward
    from attar.serving.http.vllm.loads import check_loads
    from attar.serving.http.vllm.process import find_vllm, running

    vllm, checkpoint = find_vllm(), open_checkpoint(command.model)
    checked, tokenizer = check_loads(checkpoint, vllm), tokenizer_of(checkpoint)
    if tokenizer is None:
        raise ModelError(f"{command.model} has no tokenizer, so it cannot be served")
    options = vllm_options(command, checkpoint, command.template or tokenizer.chat_template or "")
    command.show(f"{'engine':<12}vllm serve {' '.join(options)}")
    command.show(f"{'weights':<12}{checked}")
    shape, limits = geometry(checkpoint.config, ""), command.options.get("limits")
    context = min(filter(None, (command.options.get("kv_tokens"), shape.context)), default=None)
    with ExitStack() as stack:
        with command.progress.task("load", total=1) as task:
            server = stack.enter_context(running(vllm, str(checkpoint.path), options))
            task.advance()
        given = (limits or Limits()).sequences
        sequences = SEQUENCES if given == Limits().sequences else given
        backend = VllmBackend(server, context, shape.vocabulary or len(tokenizer), sequences)
        facts = {"model": command.model, "engine": "vllm", "kv_dtype": command.options.get("kv_dtype", "")}
        _run(command, backend, tokenizer, facts, forward=make_forward(backend))


SERVERS: dict[str | None, Callable[[ServeCommand], None]] = {
    None: serve_ordinary,
    "draft": serve_draft,
    "target": serve_target,
    "coordinator": serve_coordinator,
    "vllm": serve_vllm,
}


class DraftBackend(Backend):
    """A draft service as the server sees it: alive or not, with numbers; it answers no requests."""

    refusal, hint = "this service only drafts for others", "ask the server that it drafts for"

    def __init__(self, service: Any, context: int | None, vocabulary: int) -> None:
        super().__init__(context, vocabulary)
        self._service = service

    @property
    def failure(self) -> Exception | None:
        failure: Exception | None = self._service.failure
        return failure

    def stats(self) -> Stats:
        """The requests that are drafted for."""
        counts = self._service.counts
        rows = [
            ("draft_rounds", "Rounds of drafts.", counts.rounds),
            ("draft_requests_opened", "Requests that were drafted for.", counts.opened),
            ("draft_requests_refused", "Requests beyond the limits.", counts.refused),
            ("draft_tokens", "Tokens that were drafted.", counts.drafted),
            ("draft_commits", "Commits that arrived.", counts.commits),
            ("draft_commits_stale", "Of these, on another length.", counts.stale),
        ]
        samples = [MetricSample(name, help, value) for name, help, value in rows]
        return Stats(running=self._service.running, waiting=self._service.waiting, free=1, samples=samples)

    async def close(self) -> None:
        """The service is closed by its maker."""


def security_of(command: ServeCommand) -> Any:
    """The key between services, and certificates: the server's own are those of its services too."""
    from attar.serving.services.channel import Security

    services, transport = command.services, command.transport
    return Security(services.key, transport.tls_cert, transport.tls_key, services.service_ca)


def _with_drafters(
    command: ServeCommand, stack: ExitStack
) -> tuple[LLM, Callable[[], Sequence[MetricSample]]]:
    """An engine whose drafts come from services, closed with the stack; and its metrics."""
    from attar.serving.http.remote_backend import offer_samples, replica_samples
    from attar.serving.services.build import load_with_offers
    from attar.serving.services.channel import Network, check_files
    from attar.serving.services.replicas import Replicas

    endpoints, security = command.services.draft_endpoint, security_of(command)
    check_files(security)
    network = Network()
    stack.callback(network.close)
    replicas: list[Replicas] = []

    def pool(hello: Any, receive: Any) -> Replicas:
        replicas.append(Replicas(endpoints, hello, network, receive, security))
        return replicas[0]

    embeds = command.embeddings.of_causal is not None
    llm, proposer = load_with_offers(command.model, pool, command.options, embeds)
    replicas[0].trace(command.tracer)
    return llm, lambda: [*offer_samples(proposer.counts), *replica_samples(replicas[0])]


def _serve_engine(
    command: ServeCommand, llm: LLM, backend: Backend, adapters: Sequence[LoadedAdapter] = ()
) -> None:
    if llm.tokenizer is None:
        raise ModelError(f"{command.model} has no tokenizer, so it cannot be served")
    description = llm.describe()
    for line in description.lines():
        command.show(line)
    if command.defaults:
        values = ", ".join(f"{name} {value}" for name, value in command.defaults.items())
        command.show(f"{'sampling':<12}{values}, where a request has none")
    if command.lora:
        names = ", ".join(adapter.name for adapter in adapters) or "none yet"
        command.show(f"{'adapters':<12}{names}")
    second = compared_model(command) if command.settings.compare else None
    embedder = engine_embedder(llm, backend, command.embeddings)
    _run(command, backend, llm.tokenizer, description.to_dict(), second, embedder, adapters)


def _run(
    command: ServeCommand,
    backend: Backend,
    tokenizer: Any,
    facts: dict[str, Any],
    second: ServedModel | None = None,
    embedder: Embedder | None = None,
    adapters: Sequence[LoadedAdapter] = (),
    forward: APIRouter | None = None,
) -> None:
    settings = command.settings
    named, budget = named_models(command)
    if command.template:
        tokenizer.chat_template = command.template
    words = ServerTokenizer(tokenizer, special=settings.allow_special_tokens)
    if words.has_chat_template and not words.tells_roles:
        command.show(f"{'chat':<12}{PLAIN_NOTE}")
    app = create_app(
        backend,
        settings,
        tokenizer=words,
        model=command.model,
        facts=facts,
        answers=command.answers,
        defaults=command.defaults,
        transport=command.transport,
        embedder=embedder,
        compare=second,
        named=named,
        budget=budget,
        lora=None if forward is not None else command.lora,
        adapters=adapters,
        forward=forward,
        source=command.model,
        tracer=command.tracer,
    )
    run(app, settings, command.show, command.transport, command.bound)


def _show_grpc(command: ServeCommand, port: int) -> None:
    address = command.settings.address
    host = f"[{address}]" if ":" in address else address
    command.show(f"grpc://{host}:{port}")
    if not command.settings.loopback and not command.services.key:
        command.show(f"warning: grpc://{host}:{port} can be reached by other machines; set {KEY_VARIABLE}")
