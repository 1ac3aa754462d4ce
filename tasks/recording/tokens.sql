-- tokens: one row per token of a trajectory, in its order, with its text. A token that no policy
-- sampled has no log-probability; one that was not trained has no advantage. The table token_texts
-- has the texts of the tokens of each run.
create temp view tokens as

select
    trajectories.run,
    trajectories.policy,
    trajectories.step,
    trajectories.rollout_id,
    trajectories.role,
    trajectories.first_call,
    place,
    trajectories.tokens[place] as token,
    token_texts.text,
    trajectories.mask[place] = 1 as sampled,
    if(sampled, trajectories.logprobs[place], null) as logprob,
    -- The lists of a datum leave the first token out.
    if(datums.mask[place - 1] = 1, datums.advantages[place - 1], null) as advantage
from trajectories
cross join unnest(range(1, len(trajectories.tokens) + 1)) as places (place)
left join datums using (run, policy, step, rollout_id, role, first_call)
left join token_texts
    on trajectories.run = token_texts.run
    and trajectories.tokens[place] = token_texts.token;
