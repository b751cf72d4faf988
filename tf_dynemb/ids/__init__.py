"""Ids as a user passes them: conversion to `keys` of a table's type, and to `bags`.

May import: `_ops`.
"""
