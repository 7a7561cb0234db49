{{/* Who may ask what of the pods? Half a set-up is refused, and what is open is said. */}}

{{- define "refill.checkAccess" -}}
{{- range list "clients" "metrics" -}}
{{- if and (get $.Values.networkPolicy .) (not $.Values.networkPolicy.enabled) -}}
{{- fail (printf "networkPolicy.%s is set, and networkPolicy.enabled=false: then there is no policy; set it to true, or take networkPolicy.%s away" . .) -}}
{{- end -}}
{{- end -}}
{{- if not (or .Values.access.clientTokens .Values.insecure) -}}
{{- fail "access.clientTokens is empty: name a Secret with a token for each team, and access.peerToken or tls.peerSecret beside it (docs/INSTALL.md, \"Tokens and TLS\"); or set insecure=true where whoever reaches the pods may read all that they can read" -}}
{{- end -}}
{{- if and .Values.access.clientTokens .Values.insecure -}}
{{- fail "insecure is true, and access.clientTokens is set: take one of them away" -}}
{{- end -}}
{{- if and .Values.access.clientTokens (gt (int .Values.replicas) 1) (not (or .Values.access.peerToken .Values.tls.peerSecret)) -}}
{{- fail "access.clientTokens needs access.peerToken or tls.peerSecret beside it: else whoever reaches ports.peers may read and end every job" -}}
{{- end -}}
{{- end -}}

{{/* A line for each thing that is open; the pods' logs say the same. */}}
{{- define "refill.whatIsOpen" -}}
{{- $ports := .Values.ports -}}
{{- $clients := "whoever reaches" -}}
{{- if and .Values.networkPolicy.enabled .Values.networkPolicy.clients }}{{ $clients = "the peers of networkPolicy.clients, where the network enforces policies, else whoever reaches" }}{{ end -}}
{{- if .Values.insecure }}
- Port {{ int $ports.clients }}: {{ $clients }} it may register, read and end every job. Closed by access.clientTokens.
{{- end }}
{{- if not (or .Values.access.peerToken .Values.tls.peerSecret) }}
{{- if .Values.insecure }}
- Port {{ int $ports.peers }}: so may {{ if .Values.networkPolicy.enabled }}whoever reaches it where the network enforces no policies{{ else }}whoever reaches it{{ end }}. Closed by access.peerToken or tls.peerSecret.
{{- end }}
{{- end }}
{{- $urls := .Values.settings.dataset_urls -}}
{{- if or (not $urls) (has "s3://" $urls) (has "gs://" $urls) (has "az://" $urls) }}
- Jobs may name every bucket that the pods can read. Closed by settings.dataset_urls.
{{- end }}
{{- if has "hf://" $urls }}
- Jobs may name every dataset of the Hub that the pods can read. Closed by settings.dataset_urls.
{{- end }}
{{- if not .Values.tls.secret }}
- {{ ternary "Tokens and samples" "Samples" (not .Values.insecure) }} come and go in clear at port {{ int $ports.clients }}. Closed by tls.secret.
{{- end }}
{{- if and (gt (int .Values.replicas) 1) (not .Values.tls.peerSecret) }}
- Samples go in clear between pods. Closed by tls.peerSecret.
{{- end }}
{{- if not (and .Values.networkPolicy.enabled .Values.networkPolicy.metrics) }}
- Port {{ int $ports.metrics }}: whoever reaches it sees the names of all jobs. Closed by networkPolicy.metrics.
{{- end }}
{{- end -}}
