"""The step stream: conversion of messages, sessions, and the checks of a step before it runs."""
