"""Bodies of /v1/embeddings (OpenAI's), /v1/score (vLLM's) and /v1/rerank (Jina's and Cohere's)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator

from attar.serving.http.body_model import StrictModel
from attar.serving.http.protocol import TokenId, check_prompts

MAX_TEXTS = 2048  # of one request, as at OpenAI
TextList = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]


class EmbeddingRequest(StrictModel):
    """The body of POST /v1/embeddings."""

    model: str
    input: str | list[str] | list[TokenId] | list[list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)

    @field_validator("input", mode="before")
    @classmethod
    def _check_input(cls, texts: Any) -> Any:
        return check_prompts(texts)

    @property
    def texts(self) -> list[str | list[int]]:
        """Texts or token ids."""
        single = isinstance(self.input, str) or isinstance(self.input[0], int)
        return [self.input] if single else list(self.input)  # type: ignore[list-item, arg-type]


class ScoreRequest(StrictModel):
    """The body of POST /v1/score: one text and several, or as many of each."""

    model: str
    text_1: str | TextList
    text_2: str | TextList
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)

    def pairs(self) -> list[tuple[str, str]]:
        """Pairs to be scored; none where the numbers do not fit."""
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(first) == 1:
            first = first * len(second)
        return list(zip(first, second, strict=True)) if len(first) == len(second) else []


class DocumentText(BaseModel):
    """A document as an object."""

    text: str


class RerankRequest(StrictModel):
    """The body of POST /v1/rerank."""

    model: str
    query: str = Field(min_length=1)
    documents: Annotated[list[str | DocumentText], Field(min_length=1, max_length=MAX_TEXTS)]
    top_n: int | None = Field(None, ge=0)
    return_documents: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)

    @property
    def texts(self) -> list[str]:
        """Of the documents."""
        return [document if isinstance(document, str) else document.text for document in self.documents]


class EmbeddingItem(BaseModel):
    """An embedding: numbers, or float32 in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingBody(BaseModel):
    """The response of /v1/embeddings."""

    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


class ScoreItem(BaseModel):
    """The score of a pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreBody(BaseModel):
    """The response of /v1/score; ``method``: cosine, classifier or log_probability."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    method: str
    data: list[ScoreItem]
    usage: EmbeddingUsage


class RerankItem(BaseModel):
    """A document with its score."""

    index: int
    relevance_score: float
    document: DocumentText | None = None


class RerankBody(BaseModel):
    """The response of /v1/rerank, the best document first."""

    id: str
    model: str
    method: str
    results: list[RerankItem]
    usage: EmbeddingUsage
