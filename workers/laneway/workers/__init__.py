"""Workers: pull jobs from the lanes when the engine has room, claim them, run them, stream their tokens back."""
