"""Sentences about faces, of CelebA's attributes."""

from collections.abc import Set

import numpy as np

MOST = 9  # things that a sentence says of a face
HAIR = {"Black_Hair": "black", "Blond_Hair": "blond", "Brown_Hair": "brown", "Gray_Hair": "grey"}
CUT = {"Straight_Hair": "straight", "Wavy_Hair": "wavy"}
WEARS = {
    "Eyeglasses": ("glasses", "eyeglasses"),
    "Heavy_Makeup": ("heavy makeup", "a lot of makeup"),
    "Wearing_Earrings": ("earrings", "earrings"),
    "Wearing_Hat": ("a hat", "a cap or a hat"),
    "Wearing_Lipstick": ("lipstick", "lipstick"),
    "Wearing_Necklace": ("a necklace", "a necklace"),
    "Wearing_Necktie": ("a necktie", "a tie"),
}
HAS = {
    "5_o_Clock_Shadow": ("a five o'clock shadow", "stubble"),
    "Arched_Eyebrows": ("arched eyebrows", "arched brows"),
    "Bags_Under_Eyes": ("bags under the eyes", "tired eyes"),
    "Bangs": ("bangs", "a fringe"),
    "Big_Lips": ("full lips", "big lips"),
    "Big_Nose": ("a big nose", "a large nose"),
    "Bushy_Eyebrows": ("bushy eyebrows", "thick brows"),
    "Chubby": ("a round face", "a chubby face"),
    "Double_Chin": ("a double chin", "a double chin"),
    "Goatee": ("a goatee", "a goatee"),
    "High_Cheekbones": ("high cheekbones", "high cheekbones"),
    "Mustache": ("a mustache", "a moustache"),
    "Narrow_Eyes": ("narrow eyes", "narrow eyes"),
    "Oval_Face": ("an oval face", "an oval face"),
    "Pale_Skin": ("pale skin", "a pale face"),
    "Pointy_Nose": ("a pointed nose", "a pointy nose"),
    "Receding_Hairline": ("a receding hairline", "thinning hair"),
    "Rosy_Cheeks": ("rosy cheeks", "red cheeks"),
    "Sideburns": ("sideburns", "sideburns"),
}


def describe_face(names: Set[str], draw: np.random.Generator) -> str:
    """Returns a sentence that says who is seen, and up to `MOST` other things, as they are drawn.

    Args:
        names: attributes that the face has.
        draw: decides what is said, in which words and order.
    """
    male, young = "Male" in names, "Young" in names
    who = ("man" if young else "older man") if male else ("woman" if young else "older woman")
    start = ("a picture of {}", "{}", "the face of {}")[draw.integers(3)]
    article = "an" if who.startswith("o") else "a"
    smiling = "Smiling" in names and draw.random() < 0.9
    if smiling and draw.random() < 0.5:
        article, who, smiling = "a", f"smiling {who}", False
    hair = " ".join(word for kind in (CUT, HAIR) for name, word in kind.items() if name in names)
    had = [f"{hair} hair"] if hair else ["no hair"] if "Bald" in names else []
    had += [_worded(words, draw) for name, words in HAS.items() if name in names]
    had += ["a beard"] if male and "No_Beard" not in names else []
    worn = [_worded(words, draw) for name, words in WEARS.items() if name in names]
    kept = set(draw.permutation(len(had) + len(worn))[:MOST].tolist())
    had = [word for place, word in enumerate(had) if place in kept]
    worn = [word for place, word in enumerate(worn, len(had)) if place in kept]
    parts = [f"with {_listed(had, draw)}"] if had else []
    parts += [f"wearing {_listed(worn, draw)}"] if worn else []
    parts += [("smiling", "with a smile")[draw.integers(2)]] if smiling else []
    return " ".join(
        [start.format(f"{article} {who}"), *(parts[i] for i in draw.permutation(len(parts)))]
    )


def _worded(words: tuple[str, str], draw: np.random.Generator) -> str:
    return words[draw.integers(2)]


def _listed(words: list[str], draw: np.random.Generator) -> str:
    *others, last = (words[place] for place in draw.permutation(len(words)))
    return f"{', '.join(others)} and {last}" if others else last
