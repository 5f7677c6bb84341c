"""Every error that turbospark raises on purpose.

    TurbosparkError
    |- BackendError          MLX has no back end here                   (also ImportError)
    |- KernelError           a kernel cannot be compiled, loaded or run
    |- ShapeError            an array does not fit its operation          (also ValueError)
    |- OptionError           an option is unknown, refused or malformed   (also ValueError)
    |- SourceError           a path or Hub id leads to no checkpoint      (also FileNotFoundError)
    |- ConfigError           config.json or GGUF metadata is unusable     (also ValueError)
    |  `- UnsupportedError   a value or a feature that is not implemented
    |- CheckpointError       a weight file is damaged, missing or contradictory
    |- TokenizerError        a tokenizer file is damaged or missing
    |  `- TemplateError      the chat template refused the messages
    |- PromptError           a prompt cannot be run                       (also ValueError)
    |  `- ContextLengthError the prompt and its budget exceed max_context
    |- RewindError           a cache cannot go back as far as asked
    `- ProducerError         a forward pass failed; the session is tainted
       `- NonFiniteError     logits hold NaN or infinity

A message names the object, the wish, the fact, the reason and the way out.
"""


class TurbosparkError(Exception):
    """Root of every error that turbospark raises on purpose."""


class BackendError(TurbosparkError, ImportError):
    """MLX has no back end on this machine."""


class KernelError(TurbosparkError):
    """A kernel cannot be compiled, loaded or run."""


class ShapeError(TurbosparkError, ValueError):
    """An array does not fit the operation it was given to."""


class OptionError(TurbosparkError, ValueError):
    """An option is unknown, malformed, or refused by the path that was asked for."""


class SourceError(TurbosparkError, FileNotFoundError):
    """A local path or a Hub id leads to no checkpoint."""


class ConfigError(TurbosparkError, ValueError):
    """A model's configuration is damaged or contradicts itself or its weights."""


class UnsupportedError(ConfigError):
    """A configuration asks for something that is not implemented."""


class CheckpointError(TurbosparkError):
    """A weight file is damaged, missing, or holds other tensors than announced."""


class TokenizerError(TurbosparkError):
    """A tokenizer file is damaged, missing or of an unknown kind."""


class TemplateError(TokenizerError):
    """A chat template is missing, damaged, or refused the messages."""


class PromptError(TurbosparkError, ValueError):
    """A prompt cannot be run; no state has moved."""


class ContextLengthError(PromptError):
    """A prompt and its token budget do not fit max_context; no state has moved."""


class RewindError(TurbosparkError):
    """A cache cannot go back by the number of tokens asked for; it has not moved."""


class ProducerError(TurbosparkError):
    """A forward pass failed; the session it ran in is tainted."""


class NonFiniteError(ProducerError):
    """A forward pass gave logits that hold NaN or infinity."""
