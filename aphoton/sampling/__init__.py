"""How a token is chosen: `SamplingParams`, `RowSampling`, grammars and other rules; and the sampler (`.sampler`)."""

from aphoton.sampling.allowedtokens import AllowedTokens
from aphoton.sampling.badwords import BadWords
from aphoton.sampling.compiledgrammar import CompiledGrammar
from aphoton.sampling.grammar import Grammar
from aphoton.sampling.grammarcompiler import GrammarCompiler
from aphoton.sampling.grammarmasker import GrammarMasker
from aphoton.sampling.grammarvocabulary import GrammarVocabulary
from aphoton.sampling.masker import Masker, mask_words
from aphoton.sampling.masks import QUICK, fill_all, fill_quick
from aphoton.sampling.params import SamplingParams
from aphoton.sampling.processor import LogitsProcessor
from aphoton.sampling.row import RowSampling
from aphoton.sampling.rules import Rules

__all__ = [
    "QUICK",
    "AllowedTokens",
    "BadWords",
    "CompiledGrammar",
    "Grammar",
    "GrammarCompiler",
    "GrammarMasker",
    "GrammarVocabulary",
    "LogitsProcessor",
    "Masker",
    "RowSampling",
    "Rules",
    "SamplingParams",
    "fill_all",
    "fill_quick",
    "mask_words",
]
