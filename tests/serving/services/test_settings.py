"""Settings that do not fit are one line, before a model is loaded."""

import pytest

from attar.errors import UsageError
from attar.serving.services.settings import KEY_VARIABLE, ServiceSettings


@pytest.mark.parametrize(
    ("settings", "others", "words"),
    [
        ({"role": "coordinator"}, {}, "--target-endpoint HOST:PORT"),
        ({"target_endpoint": "a:1"}, {}, "role coordinator"),
        ({"draft_endpoint": ("nowhere",)}, {}, "HOST:PORT"),
        ({"draft_endpoint": ("a:99999",)}, {}, "HOST:PORT"),
        ({"draft_endpoint": ("a:1", "a:1")}, {}, "once"),
        ({"role": "draft", "draft_endpoint": ("a:1",)}, {}, "takes no draft_endpoint"),
        ({"draft_endpoint": ("127.0.0.1:1",)}, {"speculate": "suffix"}, "drafts come from one side"),
        ({"role": "draft"}, {"draft": "attar:draft"}, "MODEL itself drafts"),
        ({"role": "draft"}, {"speculate": "self"}, "MODEL itself drafts"),
        ({"role": "draft"}, {"pooling": "last"}, "pooling does not go"),
        ({"role": "coordinator", "target_endpoint": "a:1"}, {"compare": "attar:tiny"}, "compare does not go"),
        ({"grpc_port": 70000}, {}, "65535"),
    ],
)
def test_what_does_not_fit(settings, others, words):
    engine = {name: others[name] for name in others if name in ("speculate", "draft")}
    server = {name: others[name] for name in others if name not in engine}
    with pytest.raises(UsageError) as refused:
        ServiceSettings(**settings).check_with(engine, **server)
    assert words in str(refused.value)


def test_what_fits(monkeypatch):
    assert not ServiceSettings()
    monkeypatch.setenv(KEY_VARIABLE, "from-outside")
    assert ServiceSettings().key == "from-outside"
    for endpoint in ("draft:9000", "127.0.0.1:9000", "[::1]:9000", "http://draft:9000", "grpc://draft:9000/"):
        assert ServiceSettings(draft_endpoint=(endpoint,))
    ServiceSettings(role="draft").check_with({"speculate": "suffix", "draft": None})
