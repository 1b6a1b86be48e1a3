"""Text: tokenizers, chat templates, tokens to text as they come, stop strings. Knows no torch."""

from aphoton.text.bytetokenizer import ByteTokenizer
from aphoton.text.chat import ChatTemplate
from aphoton.text.detokenizer import Detokenizer
from aphoton.text.stop import StopStrings
from aphoton.text.tokenizer import Tokenizer
from aphoton.text.vocabulary import Vocabulary

__all__ = ["ByteTokenizer", "ChatTemplate", "Detokenizer", "StopStrings", "Tokenizer", "Vocabulary"]
