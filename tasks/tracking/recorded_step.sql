-- One row per answered model call, and one per ended attempt of a rollout, in the order of time.
-- A column whose name has `__` is an attribute, in whose name that is a dot.
select
    kind,
    if(kind = 'llm', span_id, rollout_id || '.' || spans.attempt) as id,
    rollout_id || '.' || spans.attempt as attempt,
    rollout_id as rollout,
    started,
    ended,
    error_type || ': ' || error_message as error,
    messages::varchar as messages,
    reply::varchar as reply,
    if(kind = 'llm', 'chat', 'invoke_agent') as gen_ai__operation__name,
    gen_ai_provider_name as gen_ai__provider__name,
    gen_ai_request_model as gen_ai__request__model,
    gen_ai_request_temperature as gen_ai__request__temperature,
    gen_ai_request_top_p as gen_ai__request__top_p,
    gen_ai_request_max_tokens as gen_ai__request__max_tokens,
    gen_ai_request_seed as gen_ai__request__seed,
    gen_ai_response_id as gen_ai__response__id,
    policy_version as gen_ai__response__model,
    gen_ai_response_finish_reasons as gen_ai__response__finish_reasons,
    gen_ai_usage_input_tokens as gen_ai__usage__input_tokens,
    gen_ai_usage_output_tokens as gen_ai__usage__output_tokens,
    shard as ratchet__shard,
    rollout_id as ratchet__rollout,
    spans.attempt as ratchet__attempt,
    role as ratchet__role,
    call as ratchet__call,
    recalled as ratchet__recalled,
    reward as ratchet__reward

from parquet_rows($spans) as spans
where kind in ('llm', 'reward', 'error') and started is not null and ended is not null
order by started, id
