"""What the surgery of `models.stages` knows of models: where they keep things, and what their layers hand on."""
