"""A model whose forward and backward are replayed as graphs, in anybody's loop.

`graphed_model` stands in for `model.forward`. `model_trials` has its eager calls, `model_capture`
captures, `lanes` keeps calls apart that wait for their backward, `model_backward` is that backward.
"""
