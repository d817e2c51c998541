"""Ready adapters for `gradlab.audit`, one for each library. gradlab depends on none of them but
Keras."""
