"""Prompts for a real model: short and long, in many scripts, code and a chat."""

__all__ = ["PROMPTS", "TOKENS"]

TOKENS = 64
"""That follow each."""
LONG = " ".join(
    f"On day {day} the ship's log says: wind {day * 7 % 12} from the {['north', 'south', 'east', 'west'][day % 4]}, "
    f"{day * 13 % 50} miles made, and the cook served {['beans', 'rice', 'fish', 'bread'][day * 3 % 4]}."
    for day in range(1, 34)
)
PROMPTS = [
    "a",
    "1",
    "\n",
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "#include <stdio.h>\n\nint main(void) {\n",
    "SELECT name, COUNT(*) FROM orders",
    "<html>\n<head>\n<title>",
    "La Révolution française commence en",
    "Die Hauptstadt von Deutschland ist",
    "El perro de mi vecino",
    "Москва — столица",
    "今天天气很好，我们",
    "日本の首都は",
    "대한민국의 수도는",
    "عاصمة مصر هي",
    "I love 🍕 and 🎉! My favourite emoji are 🙂",
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
    LONG,
]
