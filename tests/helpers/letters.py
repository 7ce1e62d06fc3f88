"""A tokenizer of one token per letter."""


class Letters:
    """A tokenizer of one token per letter, a to z and on."""

    all_special_ids: tuple[int, ...] = ()
    is_fast = True

    def __call__(self, text, **_):
        return {"input_ids": [ord(c) - 33 for c in text]}

    def decode(self, ids, **_):
        return "".join(chr(int(i) + 33) for i in ids)
