"""The lab on a page without a kernel, such as a saved notebook: the page itself trains the dense
network on a few thousand digits that it carries."""
