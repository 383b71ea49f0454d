"""One line for a comparison of bits that failed: is it rounding, or another function?"""

from collections.abc import Callable

from pytest_gtrainer.proofs.proof import Proof


def kind_in_words(prove_it: Callable[[], Proof]) -> str:
    """Return which kind of equal two sides are, in a line.

    Whatever the proof meets, the comparison that failed is what the caller has to hear of.
    """
    try:
        proof = prove_it()
    except Exception as error:
        return f"in exact arithmetic: unknown, {type(error).__name__}: {error}".partition("\n")[0]
    first, *others = str(proof).splitlines()
    begins = next((line.strip() for line in others if "begins at" in line), "")
    return f"in exact arithmetic: {first}{'; ' if begins else ''}{begins}"
