# What phalanx imports from `transformers` itself, for pyright alone. Its own `__init__.py` cannot be read without all
# of its models, which takes a fifth of the time of checking phalanx. A name that is missing here is reported where it
# is used: add it, from the module that defines it.

from os import PathLike
from typing import Any

from transformers.configuration_utils import PretrainedConfig as PretrainedConfig
from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.masking_utils import AttentionMaskInterface as AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface as AttentionInterface
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.gpt2.configuration_gpt2 import GPT2Config as GPT2Config
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast as PreTrainedTokenizerFast
from transformers.trainer import Trainer as Trainer
from transformers.trainer_utils import set_seed as set_seed
from transformers.training_args import TrainingArguments as TrainingArguments

# Their own do not say what they give, and to find it out takes seconds.
class AutoConfig:
    @classmethod
    def for_model(cls, model_type: str, **options: Any) -> PretrainedConfig: ...
    @classmethod
    def from_pretrained(cls, folder: str | PathLike[str], **options: Any) -> PretrainedConfig: ...

class AutoTokenizer:
    @classmethod
    def from_pretrained(cls, folder: str | PathLike[str], **options: Any) -> PreTrainedTokenizerBase: ...
