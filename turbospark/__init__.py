"""turbospark: runs language models fast on one machine, on MLX.

import turbospark as ts
engine = ts.load("path-or-hub-id")
print(engine.generate("Once upon a time", max_tokens=64))
"""

import importlib
from typing import TYPE_CHECKING, Any

from turbospark.errors import (
    BackendError,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    KernelError,
    NonFiniteError,
    OptionError,
    ProducerError,
    PromptError,
    RewindError,
    ShapeError,
    SourceError,
    TemplateError,
    TokenizerError,
    TurbosparkError,
    UnsupportedError,
)
from turbospark.version import __version__

try:
    _mx = importlib.import_module("mlx.core")
except ImportError as error:
    raise BackendError(
        f"MLX has no back end on this machine ({error}); install one: "
        'pip install "turbospark[cpu]" for a CPU, "turbospark[cuda13]" for an NVIDIA GPU'
    ) from error
if _mx.cuda.is_available():
    importlib.import_module("turbospark.settings").let_graphs_grow()

if TYPE_CHECKING:
    from turbospark import kernels
    from turbospark.api import (
        Engine,
        generate,
        inspect,
        load,
        make_prompt_cache,
        plan,
        stream_generate,
    )
    from turbospark.runner.conversation import Conversation
    from turbospark.runner.results import GeneratedText, GenerationResponse
    from turbospark.settings import KernelPolicy, RunnerConfig

__all__ = [
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "ContextLengthError",
    "Conversation",
    "Engine",
    "GeneratedText",
    "GenerationResponse",
    "KernelError",
    "KernelPolicy",
    "NonFiniteError",
    "OptionError",
    "ProducerError",
    "PromptError",
    "RewindError",
    "RunnerConfig",
    "ShapeError",
    "SourceError",
    "TemplateError",
    "TokenizerError",
    "TurbosparkError",
    "UnsupportedError",
    "__version__",
    "generate",
    "inspect",
    "kernels",
    "load",
    "make_prompt_cache",
    "plan",
    "stream_generate",
]

_HOMES = {
    "Conversation": "turbospark.runner.conversation",
    "Engine": "turbospark.api",
    "GeneratedText": "turbospark.runner.results",
    "GenerationResponse": "turbospark.runner.results",
    "KernelPolicy": "turbospark.settings",
    "RunnerConfig": "turbospark.settings",
    "generate": "turbospark.api",
    "inspect": "turbospark.api",
    "load": "turbospark.api",
    "make_prompt_cache": "turbospark.api",
    "plan": "turbospark.api",
    "stream_generate": "turbospark.api",
}


def __getattr__(name: str) -> Any:
    # What pulls in tokenizers and numpy is imported when it is first asked for.
    if name == "kernels":
        return importlib.import_module("turbospark.kernels")
    if name not in _HOMES:
        raise AttributeError(f"module 'turbospark' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
