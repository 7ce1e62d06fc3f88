"""A tokenizer that makes one token of each character, for tests that need no trained tokenizer."""


class Letters:
    """Token id = code point - 33, so that "a" is 64."""

    all_special_ids: tuple[int, ...] = ()
    is_fast = True

    def __call__(self, text, **_):
        return {"input_ids": [ord(c) - 33 for c in text]}

    def decode(self, ids, **_):
        if any(int(i) < 0 for i in ids):
            raise OverflowError("out of range integral type conversion attempted")  # as tokenizers does
        return "".join(chr(int(i) + 33) for i in ids)
