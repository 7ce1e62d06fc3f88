"""Grammars behind prompts: thoughts come first, special tokens are marks, and the masks are those that the texts themselves give."""

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from icejax import Grammar, InputError
from icejax.text.grammar.matcher import Matcher, compiled, prepared
from tests.helpers import small_tokenizers

pytest.importorskip("llguidance")
HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"]
TEXTS = ["12he", "12", "he he", "hé"]


def tokenizer_of(marks=(), template=None, *, special: bool = True) -> PreTrainedTokenizerFast:
    import json

    backend = Tokenizer.from_str(json.dumps(small_tokenizers.byte_level()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=template)
    tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    return tokenizer


def matcher_of(tokenizer, grammar: Grammar, prompt: str = "") -> Matcher:
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return compiled(grammar, tokenizer, ids, eos=(2,), vocabulary=len(tokenizer))


def accepts(matcher: Matcher, tokenizer, text: str) -> bool:
    """Says whether the masks have every token of a text, which then is complete."""
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        if matcher.over or not matcher.mask[token // 32] >> (token % 32) & 1:
            return False
        matcher.take(token)
    return bool(matcher.over or matcher.mask[0] >> 2 & 1)


def test_masks_have_the_tokens_with_which_a_text_goes_on():
    """Every token is tried by hand: its bytes continue what has come to a beginning of one of the texts."""
    from icejax.text.token_text import token_text

    tokenizer = tokenizer_of()
    pieces = [token_text(tokenizer, token)[1] for token in range(len(tokenizer))]
    specials = set(tokenizer.all_special_ids) | {0, 1, 2, 3}
    for text in TEXTS:
        matcher, come = matcher_of(tokenizer, Grammar.choice(TEXTS)), b""
        for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], None]:
            if matcher.over:
                break
            bits = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")[: len(tokenizer)]
            going = [i for i, piece in enumerate(pieces) if i not in specials]
            going = {i for i in going if any(one.encode().startswith(come + pieces[i]) for one in TEXTS)}
            expected = going | ({2} if come.decode(errors="ignore") in TEXTS else set())
            found = {*np.flatnonzero(bits).tolist()}
            is_forced = len({pieces[i][:1] for i in expected}) == 1  # then llguidance may name one token of several
            assert found == expected or (is_forced and found and found < expected)
            if token is not None:
                come += pieces[token]
                matcher.take(token)


@pytest.mark.parametrize("special", [True, False])
def test_thoughts_come_before_an_answer(special):
    tokenizer = tokenizer_of(["<think>", "</think>"], "</think>", special=special)
    grammar = Grammar.choice(["12", "he"])
    for prompt, texts, others in [
        ("x", ["12", "<think>a {b}</think>12", "<think></think>\n\nhe"], ["<think>12", "a", "<think>a</think>a"]),
        ("x<think>", ["a</think>12", "</think>\n\nhe"], ["12", "<think>a</think>12"]),
    ]:
        assert all(accepts(matcher_of(tokenizer, grammar, prompt), tokenizer, text) for text in texts)
        assert not any(accepts(matcher_of(tokenizer, grammar, prompt), tokenizer, text) for text in others)


def test_marks_that_are_no_tokens_end_thoughts_too():
    tokenizer = tokenizer_of((), "<think></think>")
    for text, expected in [("12", True), ("<think>he</think>\n12", True), ("<think>he", False), ("he", False)]:
        assert accepts(matcher_of(tokenizer, Grammar.choice(["12"]), "x"), tokenizer, text) == expected


def test_an_answer_of_harmony_is_the_final_message():
    tokenizer = tokenizer_of(HARMONY)
    begun, message = "<|start|>user<|message|>x<|end|><|start|>assistant", "<|channel|>final<|message|>12"
    thoughts = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    json_message = "<|channel|>final <|constrain|>json<|message|>12"
    for prompt, text, expected in [
        (begun, message, True),
        (begun, thoughts + json_message, True),
        (begun, thoughts * 2 + message, True),
        (begun, "12", False),
        (begun, thoughts + "12", False),
        (begun + "<|channel|>final<|message|>", "12", True),
        (begun + "<|channel|>analysis<|message|>a", "b<|end|><|start|>assistant" + message, True),
        ("x", "<|start|>assistant" + message, True),
    ]:
        assert accepts(matcher_of(tokenizer, Grammar.choice(["12"]), prompt), tokenizer, text) == expected, (prompt, text)


GBNF = """
# sums
root ::= sum "e"
sum  ::= term ("h" term)*
term ::= [0-9]+ | "(" sum ")"
"""
LARK = 'start: sum "e"\nsum: TERM ("h" TERM)* // {\nTERM: /[0-9]+/\nanswer: "x}"'  # `answer` is a name of ours too


@pytest.mark.parametrize("text, others", [(GBNF, ["(1h2)h3e", "((1))e"]), (LARK, [])])
def test_a_grammar_of_ones_own_is_followed_behind_thoughts(text, others):
    tokenizer = tokenizer_of(["<think>", "</think>"], "</think>")
    for answer, expected in [("12e", True), ("1h23e", True), ("<think>hm</think>12e", True), ("12", False), ("1he", False)]:
        assert accepts(matcher_of(tokenizer, Grammar.context_free(text)), tokenizer, answer) == expected, answer
    assert all(accepts(matcher_of(tokenizer, Grammar.context_free(text)), tokenizer, answer) for answer in others)


def test_a_tokenizer_is_read_once_for_each_set_of_ends():
    tokenizer = tokenizer_of()
    assert prepared(tokenizer, (2,)) is prepared(tokenizer, [2]) is not prepared(tokenizer, (1, 2))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Grammar.json_schema([]), r"the schema must be a JSON schema, which is an object, got \[\]"),
        (lambda: Grammar.regex(5), "a grammar's expression must be text, got 5"),
        (lambda: Grammar.choice("ab"), "a grammar's texts must be a list of texts, got 'ab'"),
        (lambda: Grammar.choice([]), r"a grammar's texts must be a list of texts, got \[\]"),
        (lambda: Grammar.context_free(5), "a grammar must be text, got 5"),
        (lambda: Grammar.context_free('a: "b"'), "^the grammar is neither Lark, with a rule 'start:', nor GBNF: "),
        (lambda: Grammar.context_free('root ::= "a'), "nor GBNF: Unexpected end of input at line 1, .*$"),
        (lambda: Grammar.context_free("root ::= " + "(" * 9999), "^a grammar in GBNF is nested too deeply$"),
        (lambda: Grammar.context_free("a ::= b\n" * 501), "^a grammar in GBNF has 501 rules and 4008 characters, of at most 500 and 32768: shorten it, or write it in Lark$"),
    ],
)  # fmt: skip
def test_a_grammar_is_made_of_what_it_needs(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_other_tokenizers_and_texts_are_refused():
    with pytest.raises(InputError, match="grammars need a tokenizer of the tokenizers library"):
        prepared(type("Other", (), {})(), ())
    with pytest.raises(InputError, match="a grammar must be Unicode text"):
        matcher_of(tokenizer_of(), Grammar.regex("\ud800"))
    for grammar, reason in [
        ("start: other", 'unknown name: "other"'),
        ("start: a\na: a", ""),
        ('%llguidance {}\nb: "c"', "no start rule"),
    ]:
        with pytest.raises(InputError, match=f"the grammar cannot be followed: .*{reason}"):
            matcher_of(tokenizer_of(), Grammar.context_free(grammar))
