"""Sweeps: trials of a recipe with different hyperparameters, which Optuna chooses.

    runs/NAME/
      sweep.json         what the sweep is: recipe, search space, metric; written once
      base.yaml          the recipe, without the values that trials change
      study.journal      Optuna's study: every trial with its values and results; or a database
      locks/             one lock per running trial, which its worker holds
      trial-0000/        the run folder of a trial
      results.json       all trials, the best one, importance of parameters; rewritten after each trial
      best.yaml          the recipe of the best trial
      report.html        the page of the sweep

Any number of workers share a study. A worker that is killed frees its locks, and another one resumes its trials.
"""
