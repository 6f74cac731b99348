"""A stand-in for vLLM: the modules that octopage's plugin meets, on numpy. Names, places and conventions are vLLM
0.34's; the code is written for these tests and shares nothing with octopage."""
